"""The model card of an export: its contents, measured results and how each program uses it.

The template is `model_card.md` in this folder; huggingface_hub fills it in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from drafttrain import __version__
from drafttrain.config.command_line import hide_folders, without_folders
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


@dataclass(frozen=True)
class Card:
    """The facts of a model card that are not in the parts themselves. None: not stated."""

    folder: str
    """The exported folder as written in commands."""
    target: str | None = None
    """Hub name or folder."""
    license: str | None = None
    """The drafter's licence, by its identifier on the Hub."""
    data: str | None = None
    """The drafter's training data: a Hub name, a file or a description."""
    measured: Measured | None = None
    engines: Sequence[str] = ()
    """Programs to write commands for; empty: all that can use the drafter."""
    source_language: str | None = None
    target_language: str | None = None
    """The languages that it was trained for if the target is multilingual."""


def write_card(card: Card, parts: Parts, found: Verification) -> str:
    """Returns the README.md of an export: Markdown with the Hub's front matter.

    Absolute paths are cut to their last part, so it names no folder of this machine.
    """
    drafter, policy, head = parts.drafter, parts.policy, parts.head
    matter = front_matter(card, [] if head is None else ["acceptance-head"])
    local = card.target is not None and on_hub(card.target) is None
    names = {name: getattr(card, name) for name in ("folder", "target", "data")}
    card = replace(card, **{name: one and without_folders(one) for name, one in names.items()})
    kind, serving = kind_of(drafter.config), serving_of(card, parts)
    shape = "encoder-decoder" if drafter.config.is_encoder_decoder else "decoder-only"
    if kind.reads_target:
        shape = f"{kind.words} for this target only"
    elif kind.drafts == "blocks":
        shape = "mask-predict block drafter"
    text = ModelCard.from_template(
        matter,
        template_path=str(TEMPLATE),
        name=card.folder.rstrip("/").rsplit("/", 1)[-1],
        card=card,
        local=local,
        policy=policy,
        rule=RULES.get(policy.verifier.kind),
        policy_words=describe_policy(policy),
        verifier_words=describe_verifier(policy),
        first_token=first_token(card, parts),
        sampling={"temperature": 0.0, "top_k": 0, "top_p": 1.0} | policy.sampling,
        drafter=drafter,
        shape=shape,
        parameters=drafter.num_parameters(),
        loads=serving.auto_class if kind.model is None else kind.model.replace(":", "."),
        head=head,
        head_labels=_warping(", labels at ", head.config.sampling) if head else "",
        found=found,
        programs=programs(drafter.config),
        engines=engines_for(card.engines, drafter.config),
        serving=serving,
        version=__version__,
        transformers_version=version("transformers"),
    )
    return hide_folders(str(text).strip()) + "\n"


def first_token(card: Card, parts: Parts) -> str | None:
    """Returns the token that outputs in the target language begin with; None: not forced."""
    if card.target_language is None:
        return None
    token = language_tokens(parts.tokenizer).get(card.target_language)
    return card.target_language if token is None else parts.tokenizer.convert_ids_to_tokens(token)


def on_hub(name: str | None) -> str | None:
    """Returns the name if it can be a Hub name and is no path on this machine, else None."""
    return name if name and HUB_NAME.fullmatch(name) and not Path(name).exists() else None


def front_matter(card: Card, tags: Sequence[str]) -> ModelCardData:
    """Returns the card's YAML for the Hub, without names that cannot be on the Hub."""
    return ModelCardData(
        library_name="transformers",
        tags=["speculative-decoding", "drafter", "drafttrain", *tags],
        license=card.license,
        base_model=on_hub(card.target),
        datasets=on_hub(card.data),
    )


def serving_of(card: Card, parts: Parts) -> Serving:
    """Returns the values for the commands in a card."""
    policy, drafter = parts.policy, parts.drafter
    config = drafter.generation_config if drafter.can_generate() else None
    seq2seq = drafter.config.is_encoder_decoder
    return Serving(
        target=card.target or "TARGET",
        folder=card.folder,
        auto_class="AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM",
        tokens=0 if config is None else config.num_assistant_tokens,
        confidence=0.0 if config is None else config.assistant_confidence_threshold,
        vocabulary=vocabulary_size(drafter.config),
        mask_token=getattr(drafter.config, "pard_token", None),
        p_min=policy.confidence or 0.0 if policy.stop == "confidence" else 0.0,
    )


def describe_verifier(policy: Policy) -> str:
    """Returns a description of the verifier."""
    if policy.lossy:
        return RULES[policy.verifier.kind].accepts.format(**dict(policy.verifier))
    if policy.verifier.kind == "rejection":
        return "rejection sampling, lossless"
    return "greedy match, rejection sampling above temperature 0: both lossless"


def describe_policy(policy: Policy) -> str:
    """Returns a description of the stop policy."""
    cap = f", at most {policy.max_draft} tokens"
    kinds = {
        "fixed": f"always {policy.k} tokens per round",
        "head": f"stop when the head predicts a rejection with more than h = {policy.h}{cap}",
        "entropy": f"stop after a row with entropy above {policy.entropy} nats{cap}",
        "confidence": f"stop after a token with probability below {policy.confidence}{cap}",
        "cumulative": f"stop when the draft's probability is below {policy.cumulative}{cap}",
    }
    words = kinds.get(policy.stop, f"by {policy.stop}{cap}")
    return words + _warping("; chosen for ", policy.sampling)


def _warping(before: str, sampling: dict | None) -> str:
    words = ", ".join(f"{name} {value:g}" for name, value in (sampling or {}).items())
    return before + words if words else ""
