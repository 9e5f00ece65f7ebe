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
    table: Sequence[int] | None = None
    """Likeliest successors, where max-gram has them."""

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
    kind or vocabulary, and ValueError for families that the engine cannot run.
    """
    checked = check_pair(target, drafters, bigrams)
    return open_pair(load_target(target), checked)


def open_pair(target: LoadedTarget, checked: CheckedDrafters) -> Pair:
    """A loaded target with the drafters that `check_pair` has found to fit it.

    Raises ConfigError for weights that cannot be read, or of a drafter of another target's states.
    """
    settings_of, table = checked
    drafters: dict[str, Drafter] = {}
    models: dict[str, PreTrainedModel | None] = {}
    for name, settings in settings_of.items():
        models[name] = None if settings is None else load_drafter(name, settings, target)
        if models[name] is not None:
            drafters[name] = make_drafter(models[name], target.model)
        else:
            copied = table if KINDS[name].drafts == "copies" else None
            drafters[name] = open_kind(KINDS[name], copied, target.model)
    return Pair(target, CachedModel(target.model), drafters, models, table)


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
    settings_of = {
        name: None if named_kind(name) else _check_drafter(name, target, target_settings)
        for name in drafters
    }
    return settings_of, table


def _check_drafter(
    path: str, target: TargetConfig, target_settings: PretrainedConfig
) -> PretrainedConfig:
    settings = check_drafter(path, target, target_settings, padded=True)
    kind = kind_of(settings)
    if kind is STATE_DRAFTER:
        check_states(target_settings)
    if kind.runs_as_targets:
        check_configuration(settings)
    return settings


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
