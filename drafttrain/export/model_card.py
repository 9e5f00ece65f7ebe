"""The model card: what the folder is, what was measured, and how each program uses it.

`model_card.md` beside this file is its template; huggingface_hub fills it in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from drafttrain import __version__
from drafttrain.config.command_line import hide_folders
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.config.verifiers import RULES
from drafttrain.export.engines import COMMANDS, Schedule, Serving, engines_for
from drafttrain.export.parts import Parts, programs
from drafttrain.export.verify import Verification
from drafttrain.models.drafters import vocabulary_size
from drafttrain.models.layout import count_parameters

TEMPLATE = Path(__file__).with_suffix(".md")
UNKNOWN_TARGET = "TARGET"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Measured:
    """Numbers of one report, and what a reader needs to judge them."""

    table: str
    """Markdown."""
    notes: Sequence[str]
    """Lines below the table (parity, how h was chosen)."""
    command: str
    data: str
    machine: str
    date: str
    plot: Path | None = None
    """A picture of them; it goes along as report.png."""


@dataclass(frozen=True)
class Card:
    """What a card says beyond the parts themselves. None: not stated."""

    folder: str
    """The export's name in commands."""
    target: str | None = None
    """Hub name or folder."""
    license: str | None = None
    """Of the drafter, as the Hub names it."""
    data: str | None = None
    """What the drafter was trained on: a Hub name, a file, or words."""
    measured: Measured | None = None
    engines: Sequence[str] = ()
    """Programs to write commands for; empty: all that read the plain folder."""
    schedule: Schedule = ()


def write_card(card: Card, parts: Parts, found: Verification) -> str:
    """The README.md of an export, as Markdown with the Hub's front matter.

    No folder of the machine that wrote it is named: absolute paths are cut to their last part.
    """
    drafter, policy, head = parts.drafter, parts.policy, parts.head
    kind, engines = kind_of(drafter.config), engines_for(card.engines, drafter.config)
    serving, rule = serving_of(card, parts), RULES.get(policy.verifier.kind)
    shape = "encoder-decoder" if drafter.config.is_encoder_decoder else "decoder-only"
    if kind.reads_target:
        shape = kind.described.format(shape="this target alone")
    elif kind.drafts == "blocks":
        shape = "mask-predict drafter of blocks"
    lossy = None
    if policy.lossy:
        lossy = "Lossy in greedy decoding" if rule.greedy_only else "Lossy"
    text = ModelCard.from_template(
        front_matter(card, [] if head is None else ["acceptance-head"]),
        template_path=str(TEMPLATE),
        name=card.folder.rstrip("/").rsplit("/", 1)[-1],
        card=card,
        lossy=lossy,
        rule=rule,
        policy=describe_policy(policy),
        verifier=describe_verifier(policy),
        sampling=_sampling_arguments(policy),
        config=drafter.config,
        shape=shape,
        parameters=count_parameters(drafter),
        dtype=str(drafter.dtype).removeprefix("torch."),
        loads=serving.auto_class if kind.model is None else kind.model.replace(":", "."),
        head=head,
        head_labels=_warping(", labels at ", head.config.sampling) if head else "",
        head_decides=policy.stop == "head",
        found=found,
        assisted="assisted" in programs(drafter.config),
        servers=", ".join(one.title for one in engines if one.name != "transformers"),
        engines=engines,
        serving=serving,
        serving_fields=vars(serving),
        commands=COMMANDS,
        version=__version__,
        transformers_version=version("transformers"),
    )
    return hide_folders(str(text).strip()) + "\n"


def front_matter(card: Card, tags: Sequence[str]) -> ModelCardData:
    """The card's YAML for the Hub. Only names that the Hub can know are put in it."""
    return ModelCardData(
        library_name="transformers",
        tags=["speculative-decoding", "drafter", "drafttrain", *tags],
        license=card.license,
        base_model=_on_hub(card.target),
        datasets=_on_hub(card.data),
    )


def _on_hub(name: str | None) -> str | None:
    """The name, if it can be one on the Hub and is nothing on this machine."""
    if name is None or Path(name).exists() or not HUB_NAME.fullmatch(name):
        return None
    return name


def serving_of(card: Card, parts: Parts) -> Serving:
    """What the commands of a card are made of."""
    policy = parts.policy
    p_min = policy.confidence if policy.stop == "confidence" else 0.0
    seq2seq = parts.drafter.config.is_encoder_decoder
    return Serving(
        target=card.target or UNKNOWN_TARGET,
        folder=card.folder,
        auto_class="AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM",
        tokens=parts.assisted.num_assistant_tokens,
        confidence=parts.assisted.assistant_confidence_threshold,
        vocabulary=vocabulary_size(parts.drafter.config),
        mask_token=getattr(parts.drafter.config, "pard_token", None),
        p_min=p_min or 0.0,
        schedule=card.schedule,
    )


def describe_verifier(policy: Policy) -> str:
    """What is accepted, in words."""
    if policy.lossy:
        return RULES[policy.verifier.kind].accepts.format(**dict(policy.verifier))
    if policy.verifier.kind == "rejection":
        return "rejection sampling, lossless"
    return "greedy match, rejection sampling above temperature 0: both lossless"


def describe_policy(policy: Policy) -> str:
    """When a round of drafting ends, in words."""
    cap = f", at most {policy.max_draft} tokens"
    kinds = {
        "fixed": f"always {policy.k} tokens a round",
        "head": f"stop when the head predicts a rejection with more than h = {policy.h}{cap}",
        "entropy": f"stop after a row of more than {policy.entropy} nats{cap}",
        "confidence": f"stop after a token of less than {policy.confidence} probability{cap}",
        "cumulative": f"stop once a draft is less probable than {policy.cumulative}{cap}",
    }
    words = kinds.get(policy.stop, f"by {policy.stop}{cap}")
    return words + _warping("; chosen for ", policy.sampling)


def _warping(before: str, sampling: dict | None) -> str:
    words = ", ".join(f"{name} {value:g}" for name, value in (sampling or {}).items())
    return before + words if words else ""


def _sampling_arguments(policy: Policy) -> str:
    """Sampling as the policy was chosen for, as arguments of generate."""
    if not policy.sampling.get("temperature"):
        return ""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | policy.sampling
    return (
        f"\n    do_sample=True, temperature={values['temperature']:g}, "
        f"top_k={values['top_k']:.0f}, top_p={values['top_p']:g},"
    )
