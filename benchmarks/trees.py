"""What draft trees cost beside the models: growing them, masks, verification, keeping the cache.

    python benchmarks/trees.py --target FOLDER --drafter FOLDER --data FILE [--limit 10]

    python benchmarks/trees.py --target checkpoints/functions-target \\
        --drafter checkpoints/functions-drafter --data data/functions/test.jsonl.gz

Every input is decoded with every tree in turn; each figure is the median over the inputs of the
mean milliseconds a round, with the quartiles. `models` is time inside the calls of target and
drafter, `outside` all the rest of a round. `growth` is choosing or drawing the nodes; its share is
of the drafter's calls. OPT-Trees are grown greedily to 10 levels, the others at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from drafttrain.build.pairs import load_pair
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.config.progress import tracked
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.batched import Batched
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Verifier
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.trees.chosen import Optimal, OptimalGrowth
from drafttrain.decoding.trees.drawn import (
    Beam,
    BeamGrowth,
    Branching,
    BranchingGrowth,
    Paths,
    PathsGrowth,
)
from drafttrain.decoding.trees.verifiers import KSeq, RecursiveRejection
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.prompts import read_prompts

GREEDY, SAMPLED = Sampling(), Sampling(1.0)
TREES: dict[str, tuple[Any, int, Verifier, Sampling]] = {
    "opt-tree 30": (Optimal(30), 10, GreedyMatch(), GREEDY),
    "opt-tree 60": (Optimal(60), 10, GreedyMatch(), GREEDY),
    "rsd-c 30": (Branching((2, 2, 2, 2)), 4, RecursiveRejection, SAMPLED),
    "rsd-c 62": (Branching((2, 2, 2, 2, 2)), 5, RecursiveRejection, SAMPLED),
    "rsd-s 30": (Beam(6), 5, RecursiveRejection, SAMPLED),
    "rsd-s 60": (Beam(12), 5, RecursiveRejection, SAMPLED),
    "paths 30": (Paths(6), 5, KSeq, SAMPLED),
    "paths 60": (Paths(12), 5, KSeq, SAMPLED),
}
"""Shape, levels, verifier and sampling of trees of about 30 and 60 nodes."""


class Clock:
    """Seconds spent in methods, by name."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def running(self, drafter: Batched) -> Iterator[None]:
        """Time the models' calls, growth and verification, until the context ends."""

        def of_model(model: Batched) -> str:
            return "drafter" if model is drafter else "target"

        with ExitStack() as stack:
            stack.enter_context(self._timed(Batched, "call", of_model))
            for kind in (OptimalGrowth, BeamGrowth, BranchingGrowth, PathsGrowth):
                for name in ("grow", "proposal"):
                    stack.enter_context(self._timed(kind, name, lambda _: "growth"))
            stack.enter_context(self._timed(Verifier, "verify", lambda _: "verification"))
            yield

    def _timed(self, kind: type, name: str, part: Callable[[Any], str]) -> Any:
        method = getattr(kind, name)

        def timed(own: Any, *arguments: Any, **named: Any) -> Any:
            began = perf_counter()
            try:
                return method(own, *arguments, **named)
            finally:
                self.seconds[part(own)] += perf_counter() - began

        return patch.object(kind, name, timed)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    pair = load_pair(TargetConfig(path=arguments.target), arguments.drafter)
    if pair.kind is None or not pair.kind.is_language_model:
        raise SystemExit(f"--drafter {arguments.drafter}: give a language model")
    target = CachedModel(pair.target.model)
    rows = load_inputs(DataConfig(path=arguments.data, limit=arguments.limit))
    prompts, _ = read_prompts(pair.target, target, rows)
    decoders = {
        name: Decoder(
            target,
            TreeDrafter(pair.drafter, shape),
            FixedLength(depth),
            verifier,
            sampling,
            partial(sequence_randomness, arguments.seed),
        )
        for name, (shape, depth, verifier, sampling) in TREES.items()
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in TREES}
    for decoder in decoders.values():
        decoder.decode_all([prompts[0].source], 16)
    for prompt in tracked(prompts, "decode", "input"):
        for name, decoder in decoders.items():
            figures = measure(decoder, prompt.source, arguments.max_new_tokens, pair.drafter.model)
            found[name].append(figures)
    report = {name: summarise(figures) for name, figures in found.items()}
    show(report)
    if arguments.out is not None:
        environment = describe_environment().model_dump()
        text = json.dumps({"environment": environment, "figures": report}, indent=2)
        arguments.out.write_text(text + "\n", encoding="utf-8")


def measure(decoder: Decoder, source, max_new_tokens: int, drafter: CachedModel) -> dict:
    """Milliseconds a round of one sequence; encoding and the prompt's own pass are left out."""
    clock = Clock()
    with clock.running(drafter.engine):
        [output] = decoder.decode_all([source], max_new_tokens)
    rounds = output.rounds[1:]
    whole = sum(played.draft_seconds + played.target_seconds for played in output.rounds)
    count = len(output.rounds)
    spent = {part: 1e3 * seconds / count for part, seconds in clock.seconds.items()}
    models = spent["target"] + spent["drafter"]
    return {
        "nodes": float(np.mean([len(played.drafted) for played in rounds])) if rounds else 0.0,
        "calls": sum(played.passes for played in output.rounds) / count,
        "round": 1e3 * whole / count,
        **spent,
        "outside": 1e3 * whole / count - models,
        "growth share": spent["growth"] / spent["drafter"],
    }


def summarise(figures: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    table = {}
    for name in figures[0]:
        values = [one[name] for one in figures]
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
        table[name] = {"median": float(middle), "low": float(low), "high": float(high)}
    return table


def show(report: dict[str, dict[str, dict[str, float]]]) -> None:
    names = list(next(iter(report.values())))
    print(f"{'tree':12}" + "".join(f"{name:>14}" for name in names))
    for tree, figures in report.items():
        cells = [
            f"{100 * figures[name]['median']:.0f} %"
            if name == "growth share"
            else f"{figures[name]['median']:.2f}"
            for name in names
        ]
        print(f"{tree:12}" + "".join(f"{cell:>14}" for cell in cells))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--drafter", required=True, help="a language model that drafts for it")
    parser.add_argument("--data", required=True, help="file of inputs")
    parser.add_argument("--limit", type=int, default=10, help="most inputs")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
