"""The model card: what the folder is, what was measured, and how each program uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from drafttrain.build.policy import HEAD, is_lossy
from drafttrain.config.command_line import hide_folders
from drafttrain.config.engines import Engine
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.config.serving import GgufConfig
from drafttrain.config.verifiers import RULES
from drafttrain.export.engines.checks import engines_for
from drafttrain.export.engines.serving import Schedule, Serving, section
from drafttrain.export.parts import Parts, programs
from drafttrain.export.provenance import Provenance, front_matter, origin
from drafttrain.export.reload import Verification, vocabulary_size
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.layout import count_parameters
from drafttrain.models.speech import shares_encoder

UNKNOWN_TARGET = "TARGET"


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
    p_min: float | None = None
    """None: as the policy says."""
    schedule: Schedule = ()
    gguf: GgufConfig = GgufConfig()


@dataclass(frozen=True)
class Card:
    """What a card says beyond the parts themselves."""

    folder: str
    """The export's name, as commands will give it."""
    made_from: Provenance = Provenance()
    measured: Measured | None = None
    plan: Plan = Plan()

    @property
    def target(self) -> str | None:
        return self.made_from.target


def write_card(card: Card, parts: Parts, found: Verification) -> str:
    """The README.md of an export, as Markdown with the Hub's front matter.

    No folder of the machine that wrote it is named: absolute paths are cut to their last part.
    """
    tags = [] if parts.head is None else ["acceptance-head"]
    runs_as_targets = kind_of(parts.drafter.config).runs_as_targets
    sections = [
        front_matter(card.made_from, tags),
        _what(card, parts),
        _measured(card.measured),
        _verified(card, parts, found),
        _uses(card, parts) if runs_as_targets else _uses_of_our_own(card, parts),
        origin(card.made_from),
    ]
    return hide_folders("\n\n".join(section.strip() for section in sections)) + "\n"


def _what(card: Card, parts: Parts) -> str:
    drafter = parts.drafter
    target = f"`{card.target}`" if card.target else "a target with the same tokenizer"
    shape = "encoder-decoder" if drafter.config.is_encoder_decoder else "decoder-only"
    kind = kind_of(drafter.config)
    if kind.reads_target:
        shape = kind.described.format(shape="this target alone")
    elif kind.drafts == "blocks":
        shape = "mask-predict drafter of blocks"
    elif shares_encoder(drafter.config):
        shape = "decoder that reads its target's encoder"
    dtype = str(drafter.dtype).removeprefix("torch.")
    lines = [
        f"# {card.folder.rstrip('/').rsplit('/', 1)[-1]}",
        "",
        f"A drafter for speculative decoding of {target}: it proposes tokens, the target checks "
        "several of them in one call, and with a lossless rule the output is the target's own, "
        "token for token when decoding greedily and in distribution when sampling.",
        *_lossy_warning(parts.policy),
        "",
        "| part | what |",
        "| --- | --- |",
        f"| drafter | `{drafter.config.model_type}`, {shape}, {count_parameters(drafter):,} "
        f"parameters, {dtype}, vocabulary {vocabulary_size(drafter):,} |",
    ]
    if parts.head is not None:
        lines.append(f"| `{HEAD}/` | {_describe_head(parts.head)} |")
    words = f"{describe_policy(parts.policy)}; {describe_verifier(parts.policy)}"
    lines.append(f"| `policy.json` | {words} |")
    if "custom_generate" in programs(drafter.config):
        lines.append(f"| `custom_generate/` | drafttrain {version('drafttrain')} in Transformers |")
    return "\n".join(lines)


def _lossy_warning(policy: Policy) -> list[str]:
    if not is_lossy(policy):
        return []
    rule = RULES[policy.verifier.kind]
    return [
        "",
        f"**Lossy in greedy decoding:** {describe_verifier(policy)} ({rule.paper}). "
        'With `policy={"stop": ...}` in the call and no verifier in it, it is lossless.',
    ]


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
        "head": f"stop when the head thinks a rejection likelier than h = {policy.h}{cap}",
        "entropy": f"stop after a row of more than {policy.entropy} nats{cap}",
        "confidence": f"stop after a token of less than {policy.confidence} probability{cap}",
        "cumulative": f"stop once a draft is less probable than {policy.cumulative}{cap}",
        "logistic": "stop when a logistic function of the row's largest probability, learned in "
        f"each sequence, makes a rejection likelier than {policy.logistic}{cap}",
        "bandit": f"by the stop rule that has paid best in the sequence so far{cap}",
    }
    words = kinds[policy.stop]
    if policy.sampling:
        chosen = ", ".join(f"{name} {value:g}" for name, value in policy.sampling.items())
        words += f"; chosen for {chosen}"
    return words


def _describe_head(head: AcceptanceHead) -> str:
    config = head.config
    trained = ""
    if config.sampling:
        warping = ", ".join(f"{name} {value:g}" for name, value in config.sampling.items())
        trained = f", labels at {warping}"
    return (
        f"acceptance head (SpecDec++, arXiv 2405.19715): {config.depth} residual blocks, weight "
        f"of rejections {config.rejection_weight:g}, {head.num_parameters():,} parameters{trained}"
    )


def _measured(measured: Measured | None) -> str:
    if measured is None:
        return "## Measured\n\nNothing yet: `drafttrain eval` measures a drafter on your inputs."
    notes = "\n".join(f"- {note}" for note in measured.notes)
    plot = "" if measured.plot is None else "![What was measured](report.png)\n\n"
    return (
        f"## Measured\n\nOn {measured.data}, {measured.date}; {measured.machine}.\n\n"
        f"    {measured.command}\n\n{measured.table.strip()}\n\n{plot}{notes}"
    )


def _verified(card: Card, parts: Parts, found: Verification) -> str:
    lines = [
        "## Verified",
        "",
        "Loaded again in a fresh process, and compared with what was exported:",
        "",
        "- weights, logits, tokenizer, vocabulary, policy and generation settings are the same",
    ]
    if found.drafted:
        lines.append(f"- the drafts for {found.drafted} inputs are the same")
    if found.decoded:
        ties = f"; {found.ties} of them but for ties of the target's logits" if found.ties else ""
        inputs, how = "inputs", "custom_generate and the lossless rule"
        if "custom_generate" not in programs(parts.drafter.config):
            inputs, how = "clips of noise", "this drafter as `assistant_model`"
        lines.append(
            f"- for {found.decoded} of {found.decoded} {inputs}, `{card.target}` with {how} gave "
            f"its own greedy output{ties}"
        )
    return "\n".join(lines)


def _uses(card: Card, parts: Parts) -> str:
    if shares_encoder(parts.drafter.config):
        return "## Use\n\n" + _use_hearing(card, parts)
    serving, engines = serving_of(card, parts), engines_of(card, parts)
    sections = [_reach(card, parts), _use_custom(card, parts)]
    sections += [section(engine, serving) for engine in engines]
    sections.append(
        "Written for these programs as they were in late 2026, Transformers "
        f"{version('transformers')}."
    )
    return "## Use\n\n" + "\n\n".join(sections)


def engines_of(card: Card, parts: Parts) -> list[Engine]:
    """Those that the card has commands for; see `engines_for`."""
    return engines_for(card.plan.engines, parts.drafter.config)


def serving_of(card: Card, parts: Parts) -> Serving:
    """What the commands of a card are made of."""
    policy, p_min = parts.policy, card.plan.p_min
    if p_min is None:
        p_min = policy.confidence if policy.stop == "confidence" else 0.0
    return Serving(
        target=card.target or UNKNOWN_TARGET,
        folder=card.folder,
        auto_class=_auto_class(parts.drafter),
        tokens=parts.assisted.num_assistant_tokens,
        confidence=parts.assisted.assistant_confidence_threshold,
        vocabulary=vocabulary_size(parts.drafter),
        mask_token=getattr(parts.drafter.config, "pard_token", None),
        p_min=p_min or 0.0,
        schedule=card.plan.schedule,
        gguf=card.plan.gguf,
    )


def _reach(card: Card, parts: Parts) -> str:
    """Which way of using the folder uses what in it."""
    head = "yes" if parts.policy.stop == "head" else "not by this policy"
    if parts.head is None:
        head = "none here"
    rows = [
        "| with | drafter | `policy.json` | acceptance head |",
        "| --- | --- | --- | --- |",
        f"| Transformers, `custom_generate` (drafttrain) | yes | yes | {head} |",
    ]
    if "assisted" in programs(parts.drafter.config):
        rows.append("| Transformers, `assistant_model` alone | yes | no | no |")
    servers = [one.title for one in engines_of(card, parts) if "servers" in one.programs]
    if servers:
        rows.append(f"| {', '.join(servers)} | yes | no | no |")
    return "\n".join(rows)


def _use_custom(card: Card, parts: Parts) -> str:
    target = card.target or UNKNOWN_TARGET
    kind = _auto_class(parts.drafter)
    # encoder-decoder models often ask for beams, which have no drafts
    beams = " num_beams=1," if parts.drafter.config.is_encoder_decoder else ""
    return f"""### Transformers with custom_generate

Needs `pip install drafttrain`; `trust_remote_code` runs `custom_generate/generate.py`, a few
lines that call it. Padded batches, greedy decoding and sampling.

```python
from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = {kind}.from_pretrained("{target}")
inputs = tokenizer("...", return_tensors="pt", return_token_type_ids=False)
output = target.generate(
    **inputs, max_new_tokens=256,{beams}{_sampling_arguments(parts.policy)}
    custom_generate="{card.folder}", trust_remote_code=True,
)
```

Should the folder have moved, load the drafter from where it is and pass it:
`assistant_model={kind}.from_pretrained(...)`."""


def _use_hearing(card: Card, parts: Parts) -> str:
    target, assisted = card.target or UNKNOWN_TARGET, parts.assisted
    return f"""Transformers' assisted generation takes this folder as it is, without remote code.
The drafter reads what the target's encoder puts out, so load it with `AutoModelForCausalLM`: as a
speech model it would look for an encoder of its own, which is not in the folder.

```python
from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq, AutoProcessor

processor = AutoProcessor.from_pretrained("{target}")
target = AutoModelForSpeechSeq2Seq.from_pretrained("{target}")
drafter = AutoModelForCausalLM.from_pretrained("{card.folder}")
inputs = processor(audio, sampling_rate=16_000, return_tensors="pt")  # at most 30 s
output = target.generate(**inputs, assistant_model=drafter, do_sample=False, num_beams=1)
print(processor.batch_decode(output, skip_special_tokens=True))
```

One clip at a time, {assisted.num_assistant_tokens} tokens a round, confidence threshold
{assisted.assistant_confidence_threshold:g} (both in `generation_config.json`). With any assistant
Transformers drops the target's `begin_suppress_tokens`, so an output may differ from `generate`'s
where those would have changed its first token.

drafttrain keeps them, decodes batches, and follows `policy.json`:

```bash
drafttrain generate --target {target} --drafter {card.folder} --data clips.jsonl
```"""


def _uses_of_our_own(card: Card, parts: Parts) -> str:
    target, auto = card.target or UNKNOWN_TARGET, _auto_class(parts.drafter)
    module, own = kind_of(parts.drafter.config).model.split(":")
    return f"""## Use

Only drafttrain knows this kind of drafter (`pip install drafttrain`). It decodes with it in
Transformers; `trust_remote_code` runs `custom_generate/generate.py`, a few lines that call it:

```python
from transformers import {auto}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = {auto}.from_pretrained("{target}")
inputs = tokenizer("...", return_tensors="pt", return_token_type_ids=False)
output = target.generate(
    **inputs, max_new_tokens=128, num_beams=1,
    custom_generate="{card.folder}", trust_remote_code=True,
)
```

Should the folder have moved, load the drafter with
`from {module} import {own}; {own}.from_pretrained(...)` and pass
it as `assistant_model`.

or on the command line:

```bash
drafttrain generate --target {target} --drafter {card.folder} --text "..."
```"""


def _sampling_arguments(policy: Policy) -> str:
    """Sampling as the policy was chosen for, as arguments of generate."""
    if not policy.sampling.get("temperature"):
        return ""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | policy.sampling
    return (
        f"\n    do_sample=True, temperature={values['temperature']:g}, "
        f"top_k={values['top_k']:.0f}, top_p={values['top_p']:g},"
    )


def _auto_class(drafter: PreTrainedModel) -> str:
    seq2seq = drafter.config.is_encoder_decoder
    return "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
