"""The model card of an export: its contents, measured results and how each program uses it.

The template is `model_card.md` in this folder; huggingface_hub fills it in.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase

from drafttrain import __version__
from drafttrain.config.base import counted
from drafttrain.config.command_line import hide_folders, without_folders
from drafttrain.config.commands import ExportConfig
from drafttrain.config.kinds import kind_of
from drafttrain.config.methods import RULES
from drafttrain.config.policy import Policy
from drafttrain.export.engines import Serving, engines_for
from drafttrain.export.parts import Parts, programs
from drafttrain.export.verify import Verification
from drafttrain.models.drafters import vocabulary_size
from drafttrain.models.languages import language_tokens

TEMPLATE = Path(__file__).with_suffix(".md")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Measured:
    """The results of one report and the conditions of the measurement."""

    table: str
    """The results as a Markdown table."""
    notes: Sequence[str]
    """Lines below the table (parity, how h was chosen)."""
    command: str
    data: str
    machine: str
    date: str
    plot: Path | None = None
    """A plot of the results, which is copied to report.png."""


def write_card(
    settings: ExportConfig, measured: Measured | None, parts: Parts, found: Verification
) -> str:
    """Returns the README.md of an export: Markdown with the Hub's front matter.

    Absolute paths are cut to their last part, so it names no folder of this machine. The settings
    have the target, if it is known.
    """
    drafter, policy, head = parts.drafter, parts.policy, parts.head
    kind, target = kind_of(drafter.config), settings.target
    path = target and target.path
    folder, name, data = (
        one and without_folders(one) for one in (folder_of(settings), path, settings.training_data)
    )
    serving = serving_of(folder, name, parts)
    shape = "encoder-decoder" if drafter.config.is_encoder_decoder else "decoder-only"
    if kind.reads_target:
        shape = f"{kind.words} for this target only"
    elif kind.drafts == "blocks":
        shape = "mask-predict block drafter"
    text = ModelCard.from_template(
        front_matter(settings, [] if head is None else ["acceptance-head"]),
        template_path=str(TEMPLATE),
        name=folder.rstrip("/").rsplit("/", 1)[-1],
        folder=folder,
        target=name,
        local=path is not None and on_hub(path) is None,
        data=data,
        settings=settings,
        parts=parts,
        measured=measured,
        rule=RULES.get(policy.verifier.kind),
        policy_words=describe_policy(policy),
        verifier_words=describe_verifier(policy),
        first_token=first_token(target and target.target_language, parts.tokenizer),
        shape=shape,
        loads=serving.auto_class if kind.model is None else kind.model.replace(":", "."),
        head_labels=_warping(", labels at ", head.config.sampling) if head else "",
        found=found,
        programs=programs(drafter.config),
        engines=engines_for(settings.engines, drafter.config),
        serving=serving,
        version=__version__,
        transformers_version=version("transformers"),
    )
    return hide_folders(str(text).strip()) + "\n"


def folder_of(settings: ExportConfig) -> str:
    """Returns the exported folder as written in commands: its name on the Hub, else its path."""
    return settings.hub or str(settings.out)


def first_token(language: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the token that outputs in a target language begin with; None: not forced."""
    token = language_tokens(tokenizer).get(language) if language else None
    return language if token is None else tokenizer.convert_ids_to_tokens(token)


def on_hub(name: str | None) -> str | None:
    """Returns the name if it can be a Hub name and is no path on this machine, else None."""
    return name if name and HUB_NAME.fullmatch(name) and not Path(name).exists() else None


def front_matter(settings: ExportConfig, tags: Sequence[str]) -> ModelCardData:
    """Returns the card's YAML for the Hub, without names that cannot be on the Hub."""
    return ModelCardData(
        library_name="transformers",
        tags=["speculative-decoding", "drafter", "drafttrain", *tags],
        license=settings.license,
        base_model=on_hub(settings.target and settings.target.path),
        datasets=on_hub(settings.training_data),
    )


def serving_of(folder: str, target: str | None, parts: Parts) -> Serving:
    """Returns the values for the commands in a card. target: its Hub name or folder."""
    policy, config = parts.policy, parts.drafter.config
    generation = parts.drafter.generation_config if parts.drafter.can_generate() else None
    return Serving(
        target=target or "TARGET",
        folder=folder,
        auto_class=f"AutoModelFor{'Seq2SeqLM' if config.is_encoder_decoder else 'CausalLM'}",
        tokens=0 if generation is None else generation.num_assistant_tokens,
        confidence=0.0 if generation is None else generation.assistant_confidence_threshold,
        vocabulary=vocabulary_size(config),
        mask_token=getattr(config, "pard_token", None),
        p_min=policy.confidence if policy.stop == "confidence" else 0.0,
    )


def describe_verifier(policy: Policy) -> str:
    """Returns a description of the verifier."""
    if policy.lossy:
        return RULES[policy.verifier.kind].accepts.format(**dict(policy.verifier))
    sampled = policy.verifier_for(greedy=False).kind.replace("auto", "rejection")
    return f"greedy match, {sampled} above temperature 0: both lossless"


def describe_policy(policy: Policy) -> str:
    """Returns a description of the stop policy."""
    words = {
        "fixed": f"always {counted(policy.k or 0, 'token')} per round",
        "head": f"stop when the head predicts a rejection with more than h = {policy.h}",
        "entropy": f"stop after a row with entropy above {policy.entropy} nats",
        "confidence": f"stop after a token with probability below {policy.confidence}",
        "cumulative": f"stop when the draft's probability is below {policy.cumulative}",
    }[policy.stop]
    words += "" if policy.stop == "fixed" else f", at most {policy.max_draft} tokens"
    words += "" if policy.speculate else "; plain decoding was as fast when it was chosen"
    return words + _warping("; chosen for ", policy.sampling)


def _warping(before: str, sampling: dict | None) -> str:
    words = ", ".join(f"{name} {value:g}" for name, value in (sampling or {}).items())
    return before + words if words else ""
