"""The exact command with which each engine serves a target and an exported drafter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from pkgutil import resolve_name
from shlex import quote

from drafttrain.config.engines import Engine
from drafttrain.config.serving import GgufConfig

Schedule = Sequence[tuple[int, int]]
"""(largest batch size, draft length), batch sizes rising: the fastest that was measured there."""


@dataclass(frozen=True)
class Serving:
    """What commands are made of."""

    target: str
    folder: str
    """Where the export lies, as commands give it."""
    auto_class: str
    """What loads both in Transformers."""
    tokens: int
    """Draft length."""
    confidence: float
    """assistant_confidence_threshold."""
    vocabulary: int
    """Rows of the drafter's embedding."""
    mask_token: int | None = None
    """The token that stands for a mask, where one call drafts a block (PARD)."""
    p_min: float = 0.0
    """--spec-draft-p-min."""
    schedule: Schedule = ()
    """Draft lengths by batch size, where a report has them."""
    gguf: GgufConfig = GgufConfig()


def section(engine: Engine, serving: Serving) -> str:
    """An engine's part of a model card."""
    command = resolve_name(engine.command)(serving)
    block = f"### {engine.title}\n\n```{engine.language}\n{command}\n```"
    notes = engine.notes.format(**vars(serving))
    return f"{block}\n\n{notes}" if notes else block


def transformers_call(serving: Serving) -> str:
    kind = serving.auto_class
    return f"""from transformers import {kind}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{serving.target}")
target = {kind}.from_pretrained("{serving.target}")
inputs = tokenizer("...", return_tensors="pt", return_token_type_ids=False)
output = target.generate(
    **inputs, max_new_tokens=256,
    assistant_model={kind}.from_pretrained("{serving.folder}"),
)"""


def vllm_command(serving: Serving) -> str:
    fields: dict[str, object] = {
        "method": "draft_model",
        "model": serving.folder,
        "num_speculative_tokens": max([serving.tokens, *(k for _, k in serving.schedule)]),
    }
    if serving.mask_token is not None:
        fields["parallel_drafting"] = True
    if serving.schedule:
        starts = [1, *(size + 1 for size, _ in serving.schedule)]
        rows = [
            [start, size, k] for start, (size, k) in zip(starts, serving.schedule, strict=False)
        ]
        fields["num_speculative_tokens_per_batch_size"] = rows
    return f"vllm serve {quote(serving.target)} --speculative-config {quote(json.dumps(fields))}"


def sglang_command(serving: Serving) -> str:
    return f"""python -m sglang.launch_server --model-path {quote(serving.target)} \\
    --speculative-algorithm STANDALONE --speculative-draft-model-path {quote(serving.folder)} \\
    --speculative-num-steps {serving.tokens} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {serving.tokens + 1}"""


def tensorrt_command(serving: Serving) -> str:
    # some PARD workers draft one length, whatever the schedule says
    schedule = falling(serving.schedule) if serving.mask_token is None else ()
    longest = schedule[0][1] if schedule else serving.tokens
    fields = [f"max_draft_len: {longest}", f"speculative_model: {json.dumps(serving.folder)}"]
    if serving.mask_token is None:
        before, kind = ["disable_overlap_scheduler: true"], "Draft_Target"
    else:
        before, kind = [], "PARD"
        fields.append(f"mask_token_id: {serving.mask_token}")
    if schedule:
        shown = ", ".join(f"{size}: {k}" for size, k in schedule)
        fields.append(f"draft_len_schedule: {{{shown}}}")
    lines = ["cat > draft.yaml <<'END'", *before, "speculative_config:"]
    lines += [f"  {field}" for field in (f"decoding_type: {kind}", *fields)]
    return "\n".join([*lines, "END", f"trtllm-serve {quote(serving.target)} --config draft.yaml"])


def falling(schedule: Schedule) -> Schedule:
    """A schedule that TensorRT-LLM takes: the smallest batch has `max_draft_len`, none has more.

    None (one length for all) where the smallest batch is the fastest without drafts: its
    `max_draft_len` must be positive.
    """
    if not schedule or schedule[0][1] == 0:
        return ()
    return tuple((size, min(k, schedule[0][1])) for size, k in schedule)


def llama_command(serving: Serving) -> str:
    """With the first of the files: the others take its place."""
    folder = PurePath(serving.folder)
    files = [quote(str(folder / name)) for name in gguf_files(serving.gguf)]
    others = "".join(f"\n# or -md {file}" for file in files[1:])
    return f"""llama-server -m target.gguf -md {files[0]} --spec-type draft-simple \\
    --spec-draft-n-max {serving.tokens} --spec-draft-p-min {serving.p_min:g}{others}"""


def gguf_files(gguf: GgufConfig) -> list[str]:
    """Names of the files for llama.cpp, as its converter writes them first."""
    return [f"drafter-{kind}.gguf" for kind in (gguf.outtype, *gguf.quantise)]
