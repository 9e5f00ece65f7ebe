"""The parts of an export, loaded and checked: drafter, tokenizer, head and policy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.build.heads import find_head
from drafttrain.config.base import ConfigError
from drafttrain.config.command_line import without_folders
from drafttrain.config.commands import ExportConfig
from drafttrain.config.kinds import Program, kind_of
from drafttrain.config.policy import DEFAULT_H, HEAD, POLICY, Policy, check_policy, read_policy
from drafttrain.models.acceptance_head import AcceptanceHead, check_head_identity
from drafttrain.models.causal_drafter import demote_undrafted
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.identity import hash_weights
from drafttrain.models.language_models import keep_writable
from drafttrain.models.loading import read_tokenizer

DEFAULT_LENGTH = 4
"""Draft tokens a round of a drafter that nothing is known about. Transformers' own default of 20 is
longer than a small drafter is ever right."""


@dataclass(frozen=True)
class Parts:
    """Everything in the folder except the model card."""

    drafter: PreTrainedModel
    """Its generation_config says how Transformers' own assisted generation drafts."""
    tokenizer: PreTrainedTokenizerBase
    head: AcceptanceHead | None
    policy: Policy
    plot: Path | None = None
    """Plot of the measured numbers."""


def programs(drafter: PretrainedConfig) -> tuple[Program, ...]:
    """The programs that can use an export of a drafter. Servers draft for decoder-only targets
    only; a Whisper's `generate` takes no custom_generate."""
    if (getattr(drafter, "target", None) or {}).get("takes_audio"):
        return ()
    exports = kind_of(drafter).exports
    return tuple(one for one in exports if one != "servers" or not drafter.is_encoder_decoder)


def load_parts(settings: ExportConfig) -> Parts:
    """Load and check what the settings name.

    Raises ConfigError, before weights are read where config.json is enough, for a folder that is no
    drafter, for heads and policies that are missing or do not fit each other, and for a head of
    another drafter.
    """
    config, name = read_drafter_settings(settings.drafter), f"drafter {settings.drafter!r}"
    if not programs(config):
        reason = "it reads the target's hidden states"
        if kind_of(config).exports:
            reason = "its target is a speech model, whose `generate` takes no custom_generate"
        raise ConfigError(
            f"{name} ({kind_of(config).words}) cannot be used by other programs: {reason}; "
            "`drafttrain generate` uses it as it is"
        )
    head, file = None, settings.policy
    if settings.head is not None:
        found = find_head(str(settings.head), settings.drafter, config, "head", file)
        head, file = found.head, found.file
    policy = _choose_policy(settings, config, head, file)
    tokenizer = read_tokenizer(settings.drafter, name)
    place = None if settings.target is None else settings.target.path
    drafter = load_drafter(settings.drafter, config, embeddings_of=place)
    if head is not None:
        check_head_identity(head, drafter, str(settings.head))
    undrafted = demote_undrafted(drafter) if kind_of(config).runs_as_targets else 0
    if undrafted:
        print(
            f"{name}: {undrafted:,} tokens that it does not draft get output rows that never win, "
            "wherever the export is loaded",
            file=sys.stderr,
        )
        if head is not None:  # it reads hidden states, which the output's rows do not change
            head.config.drafter["weights_sha256"] = hash_weights(drafter)
    for config in (drafter.config, *(() if head is None else (head.config,))):
        forget_folders(config)
    if drafter.can_generate():
        keep_writable(drafter)
        length, confidence = DEFAULT_LENGTH, 0.4  # Transformers' own, where it cannot stop alike
        if policy.stop == "fixed":
            length, confidence = policy.k, 0.0
        elif policy.confidence is not None:
            length, confidence = policy.max_draft, policy.confidence
        drafter.generation_config.update(
            num_assistant_tokens=settings.num_assistant_tokens or length,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=confidence,
        )
    return Parts(drafter, tokenizer, head, policy)


def forget_folders(config: PretrainedConfig) -> None:
    """Absolute paths of the models that a config.json records keep their last part."""
    for name in ("target", "drafter"):
        recorded = getattr(config, name, None)
        if isinstance(recorded, dict) and recorded.get("path"):
            setattr(config, name, recorded | {"path": without_folders(str(recorded["path"]))})


def _choose_policy(
    settings: ExportConfig,
    drafter: PretrainedConfig,
    head: AcceptanceHead | None,
    file: Path | None,
) -> Policy:
    """The policy in the file, or the defaults; with the verifier in the settings.

    Without trees and cascades, which other programs cannot use, and without the batch sizes whose
    policy stops by another head.
    """
    name = None if head is None else head.config.name
    own = () if head is None else (None, HEAD, name)
    trained = {"max_draft": drafter.k} if kind_of(drafter).drafts == "blocks" else {}
    if file is not None:
        policy = read_policy(file)
    elif head is not None:
        policy = Policy(stop="head", h=DEFAULT_H, **trained)
    else:
        length = settings.num_assistant_tokens or trained.get("max_draft", DEFAULT_LENGTH)
        policy = Policy(stop="fixed", k=length)
    if policy.stop == "head" and policy.head not in own:
        found = "no head is given" if head is None else f"--head is {name!r}"
        raise ConfigError(
            f"{file} was chosen for head {policy.head!r}, but {found}; give that head with --head, "
            "or another policy with --policy"
        )
    if any(one.method is not None for one in (policy, *policy.batches.values())):
        print(f"{file}: a tree or cascade is faster; exported is the best chain", file=sys.stderr)
    batches = {
        size: one.model_copy(update={"method": None, "head": name})
        for size, one in policy.batches.items()
        if one.stop != "head" or one.head in own
    }
    if settings.verifier is not None:
        batches = {}  # it counts at every batch size
    changes = {"drafter": drafter.model_type, "method": None, "batches": batches}
    if policy.stop == "head":
        changes["head"] = name
    if settings.verifier is not None:
        changes["verifier"] = settings.verifier
    policy = policy.model_copy(update=changes)
    check_policy(policy, POLICY if file is None else str(file))
    return policy
