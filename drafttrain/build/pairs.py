"""A target with drafters for it: checked against each other before weights are read, and loaded."""

from __future__ import annotations

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
"""What `check_pair` finds: config.json of each drafter (None: no model), max-gram's table."""


@dataclass(frozen=True)
class Pair:
    """A loaded target with loaded drafters, by their names in settings."""

    target: LoadedTarget
    model: CachedModel
    """The target as the engine runs it; made once, as that tries a call."""
    drafters: Mapping[str, Drafter]
    models: Mapping[str, PreTrainedModel | None]
    """None for a drafter that is no model."""

    @property
    def drafter(self) -> Drafter:
        """The first one."""
        return next(iter(self.drafters.values()))

    @property
    def drafter_model(self) -> PreTrainedModel | None:
        """The first one's."""
        return next(iter(self.models.values()))


def load_pair(target: TargetConfig, drafters: Sequence[str], bigrams: str | None = None) -> Pair:
    """Target and drafters, checked against each other before the weights of any are read.

    bigrams: the table of max-gram, wherever it drafts. Raises ConfigError for drafters of another
    kind, vocabulary or target's states, and for weights that cannot be read, and ValueError for
    families that the engine cannot run.
    """
    settings_of, table = check_pair(target, drafters, bigrams)
    loaded = load_target(target)
    opened: dict[str, Drafter] = {}
    models: dict[str, PreTrainedModel | None] = {}
    for name, settings in settings_of.items():
        if settings is None:
            copied = table if KINDS[name].drafts == "copies" else None
            models[name], opened[name] = None, open_kind(KINDS[name], copied, loaded.model)
        else:
            models[name] = load_drafter(name, settings, loaded)
            opened[name] = make_drafter(models[name], loaded.model)
    return Pair(loaded, CachedModel(loaded.model), opened, models)


def check_pair(
    target: TargetConfig, drafters: Sequence[str], bigrams: str | None = None
) -> CheckedDrafters:
    """Check the drafters against the target. Raises as `load_pair`; no weights are read."""
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    table = None
    if bigrams is not None:
        table = read_bigrams(bigrams, vocabulary_size(target_settings))
    settings_of: dict[str, PretrainedConfig | None] = dict.fromkeys(drafters)
    for name in drafters:
        if named_kind(name) is not None:
            continue
        settings_of[name] = settings = check_drafter(name, target, target_settings, padded=True)
        kind = kind_of(settings)
        if kind is STATE_DRAFTER:
            check_states(target_settings)
        if kind.runs_as_targets:
            check_configuration(settings)
    return settings_of, table


def make_drafter(model: PreTrainedModel, target: PreTrainedModel | None = None) -> Drafter:
    """A drafter from a loaded model; kinds that read the target's states need its model."""
    return open_kind(kind_of(model.config), model, target)


def open_kind(
    kind: DrafterKind,
    drafts_with: PreTrainedModel | Sequence[int] | None,
    target: PreTrainedModel | None,
) -> Drafter:
    """A drafter of a kind, from its model, its table of likeliest successors, or nothing."""
    given = (drafts_with, target) if kind.is_model else (drafts_with,)
    return resolve_name(kind.opens)(*given)


def drafter_for(target: PreTrainedModel, model: PreTrainedModel, name: str) -> Drafter:
    """A drafter for a loaded target from a loaded model, which messages call by the name.

    Raises ConfigError for models that do not go together, or hold NaN or infinity.
    """
    label, target_label = f"{name} {model.name_or_path!r}", f"target {target.name_or_path!r}"
    check_fit(model.config, target.config, label, target_label)
    check_finite(model, label)
    if lacks_embeddings(model.config):
        raise ConfigError(
            f"{label} was loaded without its embeddings, which its folder leaves to its target; "
            "export it (drafttrain export writes a whole folder), and load that"
        )
    if reads_states(model.config):
        check_same_target(model.config, target, model.name_or_path)
    return make_drafter(model, target)
