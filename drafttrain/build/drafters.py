"""Drafters of every kind from what they draft with."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

from transformers import PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import DrafterKind, kind_of
from drafttrain.decoding.roles import Drafter
from drafttrain.models.drafters import check_fit, reads_states
from drafttrain.models.identity import check_same_target
from drafttrain.models.target_embeddings import lacks_embeddings


def make_drafter(model: PreTrainedModel, target: PreTrainedModel | None = None) -> Drafter:
    """What drafts with a loaded model; kinds that read the target's states need its model."""
    return open_kind(kind_of(model.config), model, target)


def open_kind(
    kind: DrafterKind,
    drafts_with: PreTrainedModel | Sequence[int] | None,
    target: PreTrainedModel | None,
) -> Drafter:
    """A drafter of a kind, from its model, its table of likeliest successors, or nothing."""
    return resolve_name(kind.opens)(drafts_with, target)


def drafter_for(target: PreTrainedModel, model: PreTrainedModel, name: str) -> Drafter:
    """What drafts for a loaded target with a loaded model, which messages call by the name.

    Raises ConfigError for models that do not go together.
    """
    label, target_label = f"{name} {model.name_or_path!r}", f"target {target.name_or_path!r}"
    check_fit(model.config, target.config, label, target_label)
    if lacks_embeddings(model.config):
        raise ConfigError(
            f"{label} was loaded without its embeddings, which its folder leaves to its target; "
            "export it (drafttrain export writes a whole folder), and load that"
        )
    if reads_states(model.config):
        check_same_target(model.config, target, model.name_or_path)
    return make_drafter(model, target)
