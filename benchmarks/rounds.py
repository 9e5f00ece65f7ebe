"""What does a round cost outside the calls of models, and how does its cost grow with the history?

    python -m benchmarks.rounds share --target FOLDER --drafter FOLDER --data FILE
    python -m benchmarks.rounds history --target checkpoints/gsm8k-target \\
        --drafter checkpoints/gsm8k-drafter

`share`: every input is decoded several times; of each round the median over the repeats counts. A
model's call is all that `Batched.call` does, the layout of ids and masks included, a drafter's
projection of its slots, and encoders with all that is kept of a source. Outside are choosing draft
tokens, warping, verification, committing and bookkeeping. The share is the time outside of all
time, with its 95 % interval over rounds, and the table says where that time goes: measured apart,
since the finer clock takes time itself.

`history`: rounds behind texts of 256 to 4096 tokens, of a decoder-only target with rotary
positions, whose limit is lifted: speed does not depend on what the tokens mean. The medians over
rounds, of attention alone too, and how much of the growth is attention.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch

from benchmarks.round_clock import MODELS, Clock, Spent, causes_timed, models_timed, patched, play
from drafttrain.build.drafters import make_drafter, open_kind
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.kinds import named_kind
from drafttrain.config.progress import tracked
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.engine import stack
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import compile_calls
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation.bootstrap import (
    Estimate,
    Ratio,
    draw_resamples,
    estimate_median,
    estimate_ratio,
    with_interval,
)
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.models.drafters import load_drafter_beside
from drafttrain.models.loading import LoadedTarget, load_target

RESAMPLES = 2000
PERIOD = 64
"""Tokens after which a history repeats itself, so that max-gram finds something to copy."""
WARM_UP = 3
"""Rounds that are left out behind a history: the first one caches it."""

# the share outside model calls


def measure_share(given: argparse.Namespace, now: Callable[[], float]) -> dict[str, Any]:
    """Figures of each batch size."""
    target = load_target(TargetConfig(path=given.target))
    model = CachedModel(target.model)
    rows = load_inputs(DataConfig(path=given.data, limit=given.limit))
    prompts, _ = read_prompts(target, model, rows)
    decoder = make_decoder(model, open_drafter(given.drafter, target), given)
    sources = [prompt.source for prompt in prompts]
    compile_calls(given.compile)
    return {
        f"batch {size}": asdict(share_of(given, now, decoder, sources, size))
        for size in given.batch_size
    }


@dataclass(frozen=True)
class Share:
    """Where the time of rounds goes."""

    rounds: int
    round_ms: Estimate
    """Median of a round of the whole batch, with what comes before it."""
    outside_ms: Estimate
    outside_share: Estimate
    """Of all time."""
    parts: dict[str, Estimate]
    """Share of each part of all time, by the finer clock."""


def share_of(
    given: argparse.Namespace,
    now: Callable[[], float],
    decoder: Decoder,
    sources: Sequence[Source],
    size: int,
) -> Share:
    coarse, fine = [], []
    for repeat in tracked(range(-1, given.repeats), f"batch {size}", "repeat"):
        for kept, causes in ((coarse, False), (fine, True)):
            clock = Clock(now)
            with patched(models_timed(clock, decoder)), ExitStack() as entered:
                if causes:
                    entered.enter_context(patched(causes_timed(clock, decoder)))
                rounds = play(clock, decoder, sources, size, given.max_new_tokens)
            if repeat >= 0:  # the first warms up
                kept.append(rounds)
    whole, outside = (median_of_repeats(coarse, counts) for counts in (anything, is_outside))
    resamples = draw_resamples(len(whole), RESAMPLES)
    finer = median_of_repeats(fine, anything)
    parts = {
        part: estimate_ratio(
            Ratio(median_of_repeats(fine, partial(str.__eq__, part)), finer), resamples
        )
        for part in sorted({part for rounds in fine for spent in rounds for part in spent})
    }
    return Share(
        len(whole),
        estimate_median(1e3 * whole, resamples),
        estimate_median(1e3 * outside, resamples),
        estimate_ratio(Ratio(outside, whole), resamples),
        parts,
    )


def anything(part: str) -> bool:
    return True


def is_outside(part: str) -> bool:
    return part not in MODELS


def median_of_repeats(repeats: list[list[Spent]], counts: Callable[[str], bool]) -> np.ndarray:
    """Seconds of each round in the parts that count. Shapes: -> [rounds]."""
    return np.median(
        [
            [sum(seconds for part, seconds in spent.items() if counts(part)) for spent in rounds]
            for rounds in repeats
        ],
        axis=0,
    )


# the cost of a round by the length of the history


def measure_history(given: argparse.Namespace, now: Callable[[], float]) -> dict[str, Any]:
    """Figures of each batch size and history."""
    target = load_target(TargetConfig(path=given.target))
    longest = max(given.histories) + given.rounds * (given.draft_length + 1) + 1
    lift_limit(target.model, longest)
    drafter = open_drafter(given.drafter, target, partial(lift_limit, positions=longest))
    decoder = make_decoder(CachedModel(target.model), drafter, given)
    return {f"batch {size}": history_of(given, now, decoder, size) for size in given.batch_size}


def lift_limit(model: Any, positions: int) -> None:
    """Let a model take so many positions, and never end."""
    if model.config.is_encoder_decoder or not hasattr(model.get_decoder(), "rotary_emb"):
        raise SystemExit("--target, --drafter: give decoder-only models with rotary positions")
    limit = model.config.max_position_embeddings
    model.config.max_position_embeddings = max(limit, positions)
    model.generation_config.eos_token_id = None


def history_of(
    given: argparse.Namespace, now: Callable[[], float], decoder: Decoder, size: int
) -> list[dict[str, Any]]:
    """Figures of each history, shortest first."""
    found: dict[int, list[Spent]] = {length: [] for length in sorted(given.histories)}
    for repeat in tracked(range(given.repeats), f"batch {size}", "repeat"):
        for length, records in found.items():
            sources = [
                history(decoder.target, length, seed + size * repeat) for seed in range(size)
            ]
            clock = Clock(now)
            with patched(models_timed(clock, decoder)), clock.timed(stack, "attend", "attention"):
                rounds = play(clock, decoder, sources, size, given.rounds)
            records += rounds[WARM_UP:]
    return summarise_histories(found)


def history(model: CachedModel, length: int, seed: int) -> Source:
    """Random tokens, repeated."""
    some = np.random.default_rng(seed).integers(3, model.vocabulary, PERIOD)
    return make_source(np.resize(some, length).tolist(), model.model)


def summarise_histories(found: dict[int, list[Spent]]) -> list[dict[str, Any]]:
    """Medians over rounds, and their growth since the shortest history."""
    kinds: dict[str, Callable[[str], bool]] = {
        "round": anything,
        "attention": lambda part: part == "attention",
        "other model work": lambda part: part in MODELS and part != "attention",
        "outside": is_outside,
    }
    first: dict[str, np.ndarray] = {}
    table = []
    for length, records in found.items():
        resamples = draw_resamples(len(records), RESAMPLES, length)
        row: dict[str, Any] = {"history": length, "rounds": len(records)}
        drawn = {}
        for kind, counts in kinds.items():
            values = 1e3 * median_of_repeats([records], counts)
            row[f"{kind} ms"] = asdict(estimate_median(values, resamples))
            drawn[kind] = np.array([np.median(values), *resampled_medians(values, resamples)])
        first = first or drawn
        grown = {kind: drawn[kind] - first[kind] for kind in kinds}
        beside = grown["other model work"] + grown["outside"]
        if length != min(found):
            row["growth beside attention ms"] = asdict(with_interval(beside[0], beside[1:]))
            share = grown["attention"] / grown["round"]
            row["attention's share of growth"] = asdict(with_interval(share[0], share[1:]))
        table.append(row)
    return table


def resampled_medians(values: np.ndarray, resamples: np.ndarray) -> np.ndarray:
    return np.array([np.median(np.repeat(values, counts.astype(int))) for counts in resamples])


# what both share


def open_drafter(
    name: str, target: LoadedTarget, change: Callable[[Any], None] | None = None
) -> Drafter:
    """A drafter without a model by its name, or one from a folder, its model changed first."""
    kind = named_kind(name)
    if kind is not None:
        return open_kind(kind, None, target.model)
    model = load_drafter_beside(target, name)
    if change is not None:
        change(model)
    return make_drafter(model, target.model)


def make_decoder(model: CachedModel, drafter: Drafter, given: argparse.Namespace) -> Decoder:
    sampling = Sampling(given.temperature)
    return Decoder(
        model,
        drafter,
        FixedLength(given.draft_length),
        GreedyMatch() if sampling.greedy else RejectionSampling(),
        sampling,
        partial(sequence_randomness, 0),
    )


def main() -> None:
    given = parse_arguments()
    torch.set_num_threads(given.threads)
    now = perf_counter if given.clock == "wall" else thread_time
    measure = measure_share if given.question == "share" else measure_history
    figures = measure(given, now)
    environment = describe_environment().model_dump()
    print(f"{environment['cpu']}, {given.threads} thread(s), {given.clock} clock")
    show(figures)
    if given.out is not None:
        report = {"given": vars(given) | {"out": str(given.out)}, "environment": environment}
        text = json.dumps(report | {"figures": figures}, indent=2, default=str)
        given.out.write_text(text + "\n", encoding="utf-8")


def show(figures: Any, name: str = "") -> None:
    """Every figure in a line of its own, with its interval where it has one."""
    if isinstance(figures, dict) and set(figures) == {"value", "low", "high"}:
        print(f"{name:52} {figures['value']:9.4f} ({figures['low']:.4f} to {figures['high']:.4f})")
    elif isinstance(figures, dict):
        for key, value in figures.items():
            show(value, f"{name}, {key}" if name else key)
    elif isinstance(figures, list):
        for value in figures:
            show(value, f"{name}, {value['history']} tokens")
    else:
        print(f"{name:52} {figures:9}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--target", required=True, help="folder or Hub name of the target")
    shared.add_argument("--drafter", default="none", help="folder of a drafter, none, or max-gram")
    shared.add_argument("--draft-length", type=int, default=5)
    shared.add_argument("--temperature", type=float, default=0.0)
    shared.add_argument("--threads", type=int, default=1)
    shared.add_argument("--out", type=Path, help="file for the figures as JSON")
    shared.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time of the one thread, where other programs share the machine",
    )
    questions = parser.add_subparsers(dest="question", required=True)
    share = questions.add_parser("share", parents=[shared])
    share.add_argument("--data", required=True, help="file of inputs")
    share.add_argument("--limit", type=int, default=32, help="most inputs")
    share.add_argument("--max-new-tokens", type=int, default=64)
    share.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    share.add_argument("--repeats", type=int, default=5)
    share.add_argument("--compile", choices=["off", "auto", "on"], default="off", help="calls")
    history = questions.add_parser("history", parents=[shared])
    history.add_argument("--histories", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    history.add_argument("--rounds", type=int, default=32, help="tokens to decode behind a history")
    history.add_argument("--batch-size", type=int, nargs="+", default=[1])
    history.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if given.clock == "cpu" and given.threads > 1:
        parser.error("--clock cpu counts one thread; leave --threads at 1, or use --clock wall")
    return given


if __name__ == "__main__":
    main()
