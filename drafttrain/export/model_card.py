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
from transformers import PreTrainedModel

from drafttrain.build.policy import is_lossy
from drafttrain.config.command_line import hide_folders
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.config.verifiers import RULES
from drafttrain.export.engines import Schedule, Serving, command_of, engines_for
from drafttrain.export.parts import Parts, programs
from drafttrain.export.verify import Verification, vocabulary_size
from drafttrain.models.layout import count_parameters

TEMPLATE = Path(__file__).with_suffix(".md")
UNKNOWN_TARGET = "TARGET"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Provenance:
    """Target, data and licence. None: nobody said."""

    target: str | None = None
    """Hub name or folder of the target."""
    license: str | None = None
    """Of the drafter, as the Hub names it."""
    data: str | None = None
    """What the drafter was trained on: a Hub name, a file, or words."""


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
class Plan:
    """For which programs, and how they are to draft where the parts do not say it."""

    engines: Sequence[str] = ()
    """As settings name them; none: all that read the plain folder."""
    schedule: Schedule = ()


@dataclass(frozen=True)
class Card:
    """What a card says beyond the parts themselves."""

    folder: str
    """The export's name, as commands will give it."""
    made_from: Provenance = Provenance()
    measured: Measured | None = None
    plan: Plan = Plan()


def write_card(card: Card, parts: Parts, found: Verification) -> str:
    """The README.md of an export, as Markdown with the Hub's front matter.

    No folder of the machine that wrote it is named: absolute paths are cut to their last part.
    """
    drafter, made_from, policy = parts.drafter, card.made_from, parts.policy
    engines = engines_for(card.plan.engines, drafter.config)
    serving, rule = serving_of(card, parts), RULES.get(policy.verifier.kind)
    lossy = None
    if is_lossy(policy):
        lossy = "Lossy in greedy decoding" if rule.greedy_only else "Lossy"
    text = ModelCard.from_template(
        front_matter(made_from, [] if parts.head is None else ["acceptance-head"]),
        template_path=str(TEMPLATE),
        name=card.folder.rstrip("/").rsplit("/", 1)[-1],
        target_words=f"`{made_from.target}`" if made_from.target else "a model with its tokenizer",
        target=serving.target,
        folder=card.folder,
        lossy=lossy,
        rule=rule,
        policy=describe_policy(policy),
        verifier=describe_verifier(policy),
        sampling=_sampling_arguments(policy),
        config=drafter.config,
        shape=_shape(drafter),
        parameters=count_parameters(drafter),
        dtype=str(drafter.dtype).removeprefix("torch."),
        vocabulary=serving.vocabulary,
        auto_class=serving.auto_class,
        loads=_loader(drafter, serving.auto_class),
        head=parts.head,
        head_labels=_warping(", labels at ", parts.head.config.sampling) if parts.head else "",
        head_use="none here" if parts.head is None else _head_use(policy),
        measured=card.measured,
        found=found,
        assisted="assisted" in programs(drafter.config),
        servers=", ".join(one.title for one in engines if one.name != "transformers"),
        engines=engines,
        serving=serving,
        serving_fields=vars(serving),
        command_of=command_of,
        made_from=made_from,
        origins=[
            ("target", made_from.target),
            ("training data", made_from.data),
        ],
        version=version("drafttrain"),
        transformers_version=version("transformers"),
    )
    return hide_folders(str(text).strip()) + "\n"


def front_matter(made_from: Provenance, tags: Sequence[str]) -> ModelCardData:
    """The card's YAML for the Hub. Only names that the Hub can know are put in it."""
    return ModelCardData(
        library_name="transformers",
        tags=["speculative-decoding", "drafter", "drafttrain", *tags],
        license=made_from.license,
        base_model=_on_hub(made_from.target),
        datasets=_on_hub(made_from.data),
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
        target=card.made_from.target or UNKNOWN_TARGET,
        folder=card.folder,
        auto_class="AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM",
        tokens=parts.assisted.num_assistant_tokens,
        confidence=parts.assisted.assistant_confidence_threshold,
        vocabulary=vocabulary_size(parts.drafter),
        mask_token=getattr(parts.drafter.config, "pard_token", None),
        p_min=p_min or 0.0,
        schedule=card.plan.schedule,
    )


def describe_verifier(policy: Policy) -> str:
    """What is accepted, in words."""
    if is_lossy(policy):
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


def _head_use(policy: Policy) -> str:
    return "yes" if policy.stop == "head" else "not by this policy"


def _shape(drafter: PreTrainedModel) -> str:
    kind = kind_of(drafter.config)
    if kind.reads_target:
        return kind.described.format(shape="this target alone")
    if kind.drafts == "blocks":
        return "mask-predict drafter of blocks"
    return "encoder-decoder" if drafter.config.is_encoder_decoder else "decoder-only"


def _loader(drafter: PreTrainedModel, auto_class: str) -> str:
    kind = kind_of(drafter.config)
    return auto_class if kind.model is None else kind.model.replace(":", ".")


def _sampling_arguments(policy: Policy) -> str:
    """Sampling as the policy was chosen for, as arguments of generate."""
    if not policy.sampling.get("temperature"):
        return ""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | policy.sampling
    return (
        f"\n    do_sample=True, temperature={values['temperature']:g}, "
        f"top_k={values['top_k']:.0f}, top_p={values['top_p']:g},"
    )
