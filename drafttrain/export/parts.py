"""What an export is made of, loaded and checked: drafter, tokenizer, head and policy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.build.policy import DEFAULT_H, HEAD, POLICY, check_policy, read_policy
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import ExportConfig
from drafttrain.config.kinds import Program, kind_of
from drafttrain.config.policy import Policy
from drafttrain.models.acceptance_head import (
    AcceptanceHead,
    check_head_identity,
    check_head_shape,
    load_heads,
)
from drafttrain.models.causal_drafter import demote_undrafted
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.identity import hash_weights
from drafttrain.models.loading import read_tokenizer
from drafttrain.models.prompts import prompt_layers

DEFAULT_LENGTH = 20
"""Transformers' own default of num_assistant_tokens."""
DEFAULT_CONFIDENCE = 0.4
"""Transformers' own default of assistant_confidence_threshold."""
MAX_DRAFT = 20


@dataclass(frozen=True)
class Assisted:
    """How Transformers' own assisted generation drafts, in generation_config.json."""

    num_assistant_tokens: int
    assistant_confidence_threshold: float
    """0: none."""


@dataclass(frozen=True)
class Parts:
    """Everything that goes into a folder, but for the model card."""

    drafter: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    head: AcceptanceHead | None
    policy: Policy
    assisted: Assisted
    plot: Path | None = None
    """Picture of the measured numbers."""


def programs(drafter: PretrainedConfig) -> tuple[Program, ...]:
    """What can use an export of a drafter. Servers draft for decoder-only targets only; a Whisper's
    `generate` takes no custom_generate, and no program hands over the target's keys and values of a
    prompt."""
    of_speech = (getattr(drafter, "target", None) or {}).get("hears")
    if of_speech or prompt_layers(drafter):
        return ()
    exports = kind_of(drafter).exports
    return tuple(one for one in exports if one != "servers" or not drafter.is_encoder_decoder)


def load_parts(settings: ExportConfig) -> Parts:
    """Load and check what the settings name.

    Raises ConfigError, before weights are read where config.json is enough, for what is no drafter,
    for heads and policies that are missing or do not go together, and for a head that was trained
    for another drafter.
    """
    config = read_drafter_settings(settings.drafter)
    kind = kind_of(config)
    if not programs(config):
        raise ConfigError(
            f"drafter {settings.drafter!r} ({kind.words}) cannot be used by other programs: "
            f"{_why_not(config)}; `drafttrain generate` uses it as it is"
        )
    head_folder, head = _open_head(settings)
    policy = _choose_policy(settings, head_folder, head, config)
    if head is not None:
        check_head_shape(head, config, str(head_folder))
    tokenizer = read_tokenizer(settings.drafter, f"drafter {settings.drafter!r}")
    drafter = load_drafter(settings.drafter, config, embeddings_of=settings.target)
    if head is not None:
        check_head_identity(head, drafter, str(head_folder))
    undrafted = demote_undrafted(drafter) if kind.runs_as_targets else 0
    if undrafted:
        print(
            f"drafter {settings.drafter!r}: {undrafted:,} tokens that it does not draft get output "
            "rows that never win, wherever the export is loaded",
            file=sys.stderr,
        )
        if head is not None:  # it reads hidden states, which the output's rows do not change
            head.config.drafter["weights_sha256"] = hash_weights(drafter)
    return Parts(drafter, tokenizer, head, policy, _assisted(settings, policy))


def _why_not(drafter: PretrainedConfig) -> str:
    kind = kind_of(drafter)
    if prompt_layers(drafter):
        return "it reads the target's keys and values of the prompt (drafter.prompt=target)"
    if kind.exports:
        return "its target is a speech model, whose `generate` takes no custom_generate"
    return "it reads the target's hidden states" if kind.reads_target else "none knows it"


def _open_head(settings: ExportConfig) -> tuple[Path | None, AcceptanceHead | None]:
    """The head to export and its folder. None where none is asked for."""
    if settings.head is not None and settings.heads is not None:
        raise ConfigError("--head and --heads are both given; give one of them")
    if settings.head is not None:
        found = load_heads(settings.head)
        if len(found) > 1:
            raise ConfigError(
                f"{str(settings.head)!r} holds {len(found)} heads; give the folder of one, or "
                "--heads with the run and its policy.json"
            )
        [head] = found.values()
        return settings.head, head
    if settings.heads is None:
        return None, None
    places = [settings.heads / POLICY, settings.heads / "final" / POLICY]
    file = settings.policy or next((place for place in places if place.is_file()), None)
    if file is None:
        raise ConfigError(
            f"{str(settings.heads)!r} holds no {POLICY} that says which head to take; run "
            "`drafttrain tune`, or give one head's folder with --head"
        )
    name = read_policy(file).head
    found = load_heads(settings.heads)
    if name not in found:
        raise ConfigError(
            f"{file} chose head {name!r}, but {str(settings.heads)!r} holds "
            f"{', '.join(sorted(found))}; give one of them with --head"
        )
    final = settings.heads / "final"
    return (final if final.is_dir() else settings.heads) / name, found[name]


def _choose_policy(
    settings: ExportConfig,
    head_folder: Path | None,
    head: AcceptanceHead | None,
    drafter: PretrainedConfig,
) -> Policy:
    """The policy given, or lying beside the head, or the defaults."""
    file = settings.policy
    if file is None and head_folder is not None:
        beside = [head_folder.parent / POLICY, head_folder / POLICY]
        file = next((place for place in beside if place.is_file()), None)
    if file is not None:
        policy = _for_this_head(_chains_of(read_policy(file), file), file, head)
        policy = policy.model_copy(update={"batches": _batches_of(policy, head)})
    elif head is not None:
        longest = drafter.k if kind_of(drafter).drafts == "blocks" else MAX_DRAFT
        policy = Policy(stop="head", h=DEFAULT_H, max_draft=longest, head=head.config.name)
    else:
        trained = drafter.k if kind_of(drafter).drafts == "blocks" else DEFAULT_LENGTH
        policy = Policy(stop="fixed", k=settings.num_assistant_tokens or trained)
    if settings.h is not None:
        if head is None:
            raise ConfigError(f"h = {settings.h} is a head's threshold; add --head, or leave h out")
        chosen = {"stop": "head", "h": settings.h, "head": head.config.name}
        policy = policy.model_copy(update=chosen)
    triple: dict[str, Any] = {"drafter": drafter.model_type}
    if settings.verifier is not None:
        triple["verifier"] = settings.verifier
    if settings.verifier is not None or settings.h is not None:
        triple["batches"] = {}  # what is asked for counts at every batch size
    policy = policy.model_copy(update=triple)
    check_policy(policy, POLICY if file is None else str(file))
    return policy


def _chains_of(policy: Policy, file: Path) -> Policy:
    """The policy without trees and cascades, which programs of others cannot follow; says so."""
    batches = policy.batches.items()
    if any(one.method is not None for one in (policy, *policy.batches.values())):
        print(f"{file}: a tree or cascade is faster; exported is the best chain", file=sys.stderr)
    alone = {size: one.model_copy(update={"method": None}) for size, one in batches}
    return policy.model_copy(update={"method": None, "batches": alone})


def _for_this_head(policy: Policy, file: Path, head: AcceptanceHead | None) -> Policy:
    """A policy that stops by a head must have been chosen for the one exported."""
    if policy.stop != "head":
        return policy
    if head is None:
        raise ConfigError(
            f"{file} stops by head {policy.head!r}, but no head is given; add --head FOLDER"
        )
    if policy.head not in (None, HEAD, head.config.name):
        raise ConfigError(
            f"{file} was chosen for head {policy.head!r}, but --head is {head.config.name!r}; give "
            "that head, or another policy with --policy"
        )
    return policy.model_copy(update={"head": head.config.name})


def _batches_of(policy: Policy, head: AcceptanceHead | None) -> dict[int, Policy]:
    """The policies of batch sizes that the export can follow: those of other heads are left out."""
    own = () if head is None else (None, HEAD, head.config.name)
    return {
        size: one.model_copy(update={"head": None if head is None else head.config.name})
        for size, one in policy.batches.items()
        if one.stop != "head" or one.head in own
    }


def _assisted(settings: ExportConfig, policy: Policy) -> Assisted:
    by_policy = policy.confidence if policy.stop == "confidence" else None
    confidence = 0.0 if policy.stop == "fixed" else by_policy or DEFAULT_CONFIDENCE
    length = policy.k if policy.stop == "fixed" else policy.max_draft
    return Assisted(settings.num_assistant_tokens or length or DEFAULT_LENGTH, confidence)
