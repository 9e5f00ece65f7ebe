"""Loads a target with its drafters, after checking that they fit before weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import KINDS, STATE_DRAFTER, DrafterKind, kind_of, named_kind
from drafttrain.data.bigrams import read_bigrams
from drafttrain.decoding.engine.architectures import check_configuration, check_states
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter
from drafttrain.models.drafters import (
    check_drafter,
    check_fit,
    load_drafter,
    reads_states,
    vocabulary_size,
)
from drafttrain.models.identity import check_same_target
from drafttrain.models.loading import LoadedTarget, check_target, choose_device, load_target
from drafttrain.models.target_embeddings import lacks_embeddings
from drafttrain.models.weight_files import check_finite

CheckedDrafters = tuple[dict[str, PretrainedConfig | None], list[int] | None]
"""Result of `check_pair`: the config of each drafter (None: no model) and max-gram's table."""


@dataclass(frozen=True)
class Pair:
    """A loaded target with its loaded drafters by their names in settings."""

    target: LoadedTarget
    model: CachedModel
    """The target in the engine; built once, because building it runs a forward pass."""
    drafters: Mapping[str, Drafter]
    models: Mapping[str, PreTrainedModel | None]
    """The drafters' models; None for a drafter without a model."""

    @property
    def drafter(self) -> Drafter:
        """The first drafter."""
        return next(iter(self.drafters.values()))

    @property
    def drafter_model(self) -> PreTrainedModel | None:
        """The model of the first drafter."""
        return next(iter(self.models.values()))


def load_pair(target: TargetConfig, drafters: Sequence[str], bigrams: str | None = None) -> Pair:
    """Loads target and drafters, after checking that they fit before any weights are read.

    bigrams: file with the table of max-gram. Raises ConfigError for a drafter that does not fit the
    target and for weights that cannot be read, and ValueError for families that the engine lacks.
    """
    settings_of, table = check_pair(target, drafters, bigrams)
    loaded = load_target(target)
    opened: dict[str, Drafter] = {}
    models: dict[str, PreTrainedModel | None] = {}
    for name, settings in settings_of.items():
        models[name] = None if settings is None else load_drafter(name, settings, loaded)
        kind = KINDS[name] if settings is None else kind_of(settings)
        drafts_with = table if kind.drafts == "copies" else models[name]
        opened[name] = open_kind(kind, drafts_with, loaded.model)
    return Pair(loaded, CachedModel(loaded.model), opened, models)


def check_pair(
    target: TargetConfig, drafters: Sequence[str], bigrams: str | None = None
) -> CheckedDrafters:
    """Checks drafters against the target without reading weights. Raises as `load_pair` does."""
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    table = read_bigrams(bigrams, vocabulary_size(target_settings)) if bigrams else None
    settings_of: dict[str, PretrainedConfig | None] = dict.fromkeys(drafters)
    for name in drafters:
        if named_kind(name) is None:
            settings = check_drafter(name, target, target_settings, padded=True)
            if kind_of(settings) is STATE_DRAFTER:
                check_states(target_settings)
            if kind_of(settings).runs_as_targets:
                check_configuration(settings)
            settings_of[name] = settings
    return settings_of, table


def make_drafter(model: PreTrainedModel, target: PreTrainedModel | None = None) -> Drafter:
    """Makes a drafter from a loaded model; target is needed by kinds that read its states."""
    return open_kind(kind_of(model.config), model, target)


def open_kind(
    kind: DrafterKind,
    drafts_with: PreTrainedModel | Sequence[int] | None,
    target: PreTrainedModel | None,
) -> Drafter:
    """Makes a drafter of a kind from its model, or max-gram's table of next tokens, or nothing."""
    return resolve_name(kind.opens)(drafts_with, target)


def drafter_for(target: PreTrainedModel, model: PreTrainedModel, name: str) -> Drafter:
    """Makes a drafter from two loaded models; name is what messages call the drafter.

    Raises ConfigError for models that do not fit each other or have NaN or infinite weights.
    """
    label, target_label = f"{name} {model.name_or_path!r}", f"target {target.name_or_path!r}"
    check_fit(model.config, target.config, label, target_label)
    check_finite(model, label)
    if lacks_embeddings(model.config):
        raise ConfigError(
            f"{label} was loaded without its embeddings, which it shares with its target; export "
            "it with `drafttrain export` and load the export"
        )
    if reads_states(model.config):
        check_same_target(model.config, target, model.name_or_path)
    return make_drafter(model, target)
