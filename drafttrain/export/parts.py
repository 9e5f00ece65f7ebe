"""Loads and checks the parts of an export: drafter, tokenizer, acceptance head and policy."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.build.heads import find_head
from drafttrain.config.base import ConfigError
from drafttrain.config.command_line import without_folders
from drafttrain.config.commands import ExportConfig
from drafttrain.config.decode import check_given
from drafttrain.config.kinds import Program, kind_of
from drafttrain.config.methods import RULES, rules_for
from drafttrain.config.policy import DEFAULT_H, HEAD, Policy, read_policy
from drafttrain.data.shards.writing import say
from drafttrain.models.acceptance_head import AcceptanceHead, check_head_identity
from drafttrain.models.causal_drafter import demote_undrafted
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.identity import hash_weights
from drafttrain.models.language_models import keep_writable
from drafttrain.models.loading import read_tokenizer

DEFAULT_LENGTH = 4
"""Draft tokens per round if nothing else sets them. Transformers' default of 20 is longer than a
small drafter's drafts are ever accepted."""


@dataclass(frozen=True)
class Parts:
    """The contents of the exported folder except the model card."""

    drafter: PreTrainedModel
    """Its generation_config holds the settings for Transformers' assisted generation."""
    tokenizer: PreTrainedTokenizerBase
    head: AcceptanceHead | None
    policy: Policy
    plot: Path | None = None
    """The report's plot, a PNG file."""


def programs(drafter: PretrainedConfig) -> tuple[Program, ...]:
    """Returns the classes of programs that can use an export of a drafter.

    Servers need a decoder-only drafter. None for speech targets, because Whisper's `generate` has
    no custom_generate.
    """
    if (getattr(drafter, "target", None) or {}).get("takes_audio"):
        return ()
    left_out = "servers" if drafter.is_encoder_decoder else None
    return tuple(program for program in kind_of(drafter).exports if program != left_out)


def load_parts(settings: ExportConfig) -> Parts:
    """Loads and checks the drafter, tokenizer, head and policy that the settings name.

    Raises ConfigError, if possible before weights are read, for a folder that is not a drafter, for
    a head or policy that is missing or does not fit the other, and for a head that was trained for
    another drafter.
    """
    config, name = read_drafter_settings(settings.drafter), f"drafter {settings.drafter!r}"
    if not programs(config):
        reason = "it reads the target's hidden states"
        if kind_of(config).exports:
            reason = "its target is a speech model, whose `generate` takes no custom_generate"
        raise ConfigError(
            f"{name} ({kind_of(config).words}) cannot be used by other programs: {reason}; "
            "use it with `drafttrain generate`"
        )
    head, file = None, settings.policy
    if settings.head is not None:
        choice = find_head(str(settings.head), settings.drafter, config, "head", file)
        head, file = choice.head, choice.file
    policy = _choose_policy(settings, config, head, file)
    tokenizer = read_tokenizer(settings.drafter, name)
    target = None if settings.target is None else settings.target.path
    drafter = load_drafter(settings.drafter, config, embeddings_of=target)
    if head is not None:
        check_head_identity(head, drafter, str(settings.head))
    undrafted = demote_undrafted(drafter) if kind_of(config).runs_as_targets else 0
    if undrafted:
        say(
            f"{name}: {undrafted:,} tokens that it does not draft get output rows whose score is "
            "never the highest"
        )
        if head is not None:  # still valid: it reads hidden states, which do not change
            head.config.drafter["weights_sha256"] = hash_weights(drafter)
    forget_folders(drafter.config)
    if head is not None:
        forget_folders(head.config)
    if drafter.can_generate():
        keep_writable(drafter)
        length, confidence = DEFAULT_LENGTH, 0.4  # Transformers' default confidence threshold
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
    """Cuts the absolute model paths recorded in a config.json to their last part, in place."""
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
    """Returns the policy of the file, or a default policy, with the verifier of the settings.

    Leaves out trees and cascades, which other programs cannot use, and batch sizes whose policy
    needs another head. Raises ConfigError if the policy needs a head that is not given.
    """
    name = None if head is None else head.config.name
    head_names = () if head is None else (None, HEAD, name)
    if file is not None:
        policy = read_policy(file)
    elif head is not None:
        policy = Policy(stop="head", h=DEFAULT_H)
    else:
        trained = drafter.k if kind_of(drafter).drafts == "blocks" else DEFAULT_LENGTH
        policy = Policy(stop="fixed", k=settings.num_assistant_tokens or trained)
    if policy.stop == "head" and policy.head not in head_names:
        given = "no head is given" if head is None else f"--head is {name!r}"
        raise ConfigError(
            f"{file} was chosen for head {policy.head!r}, but {given}; give that head with --head, "
            "or another policy with --policy"
        )
    if any(chosen.method is not None for chosen in (policy, *policy.batches.values())):
        say(f"{file}: the best method is a tree or cascade; the best chain is exported instead")
    batches = {
        size: chosen.model_copy(update={"method": None, "head": name})
        for size, chosen in policy.batches.items()
        if chosen.stop != "head" or chosen.head in head_names
    }
    changes = {"drafter": drafter.model_type, "method": None, "batches": batches}
    if policy.stop == "head":
        changes["head"] = name
    if settings.verifier is not None:
        check_given("verifier", settings.verifier, RULES)
        rule = RULES.get(settings.verifier.kind)
        if rule and not (rule.fits(True, "deterministic") or rule.fits(False, "iid")):
            raise ConfigError(
                f"verifier.kind = {rule.name!r} is not valid for chains, which other programs "
                f"draft; give one of: {', '.join(rules_for('iid', drafts_trees=False))}"
            )
        changes |= {"verifier": settings.verifier, "batches": {}}  # one for every batch size
    return policy.model_copy(update=changes)
