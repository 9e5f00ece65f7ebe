"""Measure the speed of plain decoding in this engine, and the cost of the loop around the model.

    python benchmarks/engine.py --target FOLDER --data FILE [--drafter FOLDER] [--repeats 5]

Each input is decoded in turn by plain decoding, by Transformers' `generate` (greedy) and, given a
drafter, by speculation with k draft tokens; times are medians over the repeats. The time of a round
is split into target calls (with verification), drafting, and the rest; the encoder is timed
separately. --compile: also times compiled calls of a few lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

from drafttrain.build.method import Method
from drafttrain.build.pairs import load_pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.engine import compile_calls
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Proposal
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.prompts import Prompt, read_prompts
from drafttrain.evaluation.report import describe_environment
from drafttrain.evaluation.runner import Decoded, make_jobs, run_interleaved

import numpy as np
import torch

LENGTHS = (1, 5, 13, 26)
"""New tokens per decoder call: k draft tokens and the last committed token make k + 1."""
CACHED = 8
"""Cached tokens before such a call."""


def main() -> None:
    arguments = parse_arguments()
    pair = load_pair(TargetConfig(path=arguments.target), [arguments.drafter or "none"])
    rows = load_inputs(DataConfig(path=arguments.data, limit=arguments.limit))
    model, (prompts, _) = pair.model, read_prompts(pair, rows)
    decode = DecodeConfig(sampling=SamplingConfig(max_new_tokens=arguments.max_new_tokens))
    settings = EvalConfig(decode=decode, repeats=arguments.repeats, baselines=("generate",))
    method = Method(pair.drafter, FixedLength(arguments.k), GreedyMatch())
    jobs = make_jobs(pair, [method], settings)
    plain, *drafted, generate = run_interleaved(jobs, prompts, settings, model.device, True)
    tokens = sum(len(output.tokens) for output in plain.outputs)
    encoder = median_seconds(
        [lambda p=prompt: model.encode(p.source) for prompt in prompts], arguments.repeats
    )
    calls = call_seconds(model, prompts[0], arguments.repeats)
    figures = {
        "prompts": len(prompts),
        "tokens": tokens,
        "plain_ms_per_token": 1e3 * plain.median_seconds.sum() / tokens,
        "generate_ms_per_token": 1e3 * generate.median_seconds.sum() / tokens,
        "speedup_over_generate": generate.median_seconds.sum() / plain.median_seconds.sum(),
        "encoder_ms_per_prompt": 1e3 * encoder / len(prompts),
        **round_parts("plain", plain, encoder),
        **{f"target_call_ms_{n}_tokens": 1e3 * seconds for n, seconds in calls.items()},
    }
    for run in drafted:
        figures["speedup_over_plain"] = plain.median_seconds.sum() / run.median_seconds.sum()
        figures |= round_parts("drafted", run, encoder)
    if arguments.compile:
        compile_calls("on")
        compiled = call_seconds(model, prompts[0], arguments.repeats)
        figures |= {f"compiled_call_ms_{n}_tokens": 1e3 * s for n, s in compiled.items()}
        figures["graphs"] = model.engine.compiled.graphs.compilations
        call_seconds(model, prompts[0], 1)
        figures["graphs_more"] = model.engine.compiled.graphs.compilations - figures["graphs"]
    environment = describe_environment().model_dump()
    report = {"target": arguments.target, "environment": environment, "figures": figures}
    for name, value in figures.items():
        print(f"{name:30} {value:10.3f}" if isinstance(value, float) else f"{name:30} {value:10}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def round_parts(name: str, run: Decoded, encoder: float) -> dict[str, float]:
    """Splits the time of a round. The loop is all time outside target, drafter and encoder."""
    rounds = [round for output in run.outputs for round in output.rounds]
    in_target = sum(round.target_seconds for round in rounds)
    in_draft = sum(round.draft_seconds for round in rounds)
    loop = sum(output.seconds for output in run.outputs) - in_target - in_draft - encoder
    parts = {"target": in_target, "draft": in_draft, "loop": loop}
    return {f"{name}_{part}_ms_per_round": 1e3 * s / len(rounds) for part, s in parts.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--data", required=True, help="file of inputs")
    parser.add_argument("--drafter", help="folder of a drafter")
    parser.add_argument("--k", type=int, default=5, help="draft tokens per round")
    parser.add_argument("--limit", type=int, default=50, help="most inputs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true", help="also time compiled calls")
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return parser.parse_args()


def call_seconds(model: CachedModel, prompt: Prompt, repeats: int) -> dict[int, float]:
    """Median time of a target call with n new tokens after `CACHED` cached ones, by n."""

    def call(new: int) -> float:
        state = model.encode(prompt.source)
        committed = prompt.source.prefix.repeat(CACHED)
        nothing = committed.new_empty(0)
        model.score([state], [committed], [Proposal.empty()])
        model.keep(state, nothing)
        committed = prompt.source.prefix.repeat(CACHED + 1)
        draft = Proposal.chain(committed[:1].repeat(new - 1))
        wait(model)
        started = perf_counter()
        model.score([state], [committed], [draft])
        wait(model)
        return perf_counter() - started

    times = {new: [] for new in LENGTHS}
    for _ in range(10 * repeats):
        for new in LENGTHS:
            times[new].append(call(new))
    return {new: float(np.median(seconds)) for new, seconds in times.items()}


def median_seconds(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Sum over calls of the median time of each."""
    times = np.zeros((repeats, len(calls)))
    for repeat in range(repeats):
        for i, call in enumerate(calls):
            started = perf_counter()
            call()
            times[repeat, i] = perf_counter() - started
    return float(np.median(times, axis=0).sum())


def wait(model: CachedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


if __name__ == "__main__":
    main()
