"""Effects of size, gain and temperature on OPT-Trees, and accuracy of E(A) (OPT-Tree, Figures 4-7).

    python benchmarks/opt_tree.py --target checkpoints/functions-target \\
        --drafter checkpoints/functions-drafter --data data/functions/val.jsonl.gz --prompts 40 \\
        decode.sampling.max_new_tokens=128 --out opt_tree.json --figure docs/images/opt_tree.png

Four figures, each decoded interleaved, input by input, in rotating order:

- 4: E(A), the accepted tokens that an opt-tree expects, and accepted tokens, by round;
- 5: mean acceptance length by tree size, for opt-tree, sequoia, binary and EAGLE's tree of 25;
- 6: mean acceptance length and tokens per second by delta, the least gain of a level, and
  mu = t_draft / t_target;
- 7: mean acceptance length and tokens per second by temperature (target-walk above 0).

key=value settings are those of `drafttrain eval`. Sequoia's acceptance by rank is measured on
rank_data, by default on the rows after the decoded ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafttrain.build.method import build_method
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import Pair, load_pair
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig, StopConfig, TreeConfig
from drafttrain.config.reading import load_settings
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.writing import write_file
from drafttrain.evaluation.bootstrap import Array, draw_resamples, estimate_all
from drafttrain.evaluation.metrics import acceptance_figures, count_rounds, speed_figures
from drafttrain.evaluation.plan import measure_ranks
from drafttrain.evaluation.prompts import Prompt, read_prompts
from drafttrain.evaluation.report import describe_environment
from drafttrain.evaluation.runner import Decoded, Job, make_jobs, run_interleaved

import torch
from expectation import compare_expectation
from opt_tree_figures import Point, draw, summary

SIZES = (1, 2, 4, 8, 15, 25, 40, 60)
DELTAS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
EAGLE_NODES, EAGLE_LEVELS = 25, 5


def main() -> None:
    arguments = parse_arguments()
    try:
        settings, ranked = read_settings(arguments)
        bench = prepare(arguments, settings, ranked)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    sizes, _ = bench.measure(5, bench.sized_trees())
    deltas, decoded = bench.measure(6, bench.delta_trees())
    temperatures, _ = bench.measure(7, bench.temperature_trees())
    costs = call_costs(decoded[1])  # after plain decoding: the smallest delta
    expectation = compare_expectation(decoded[1].outputs, bench.resamples)
    points = [*sizes, *deltas, *temperatures]
    print("\n".join(summary(expectation, costs["mu"], points)))
    report = {
        "target": settings.target.model_dump(mode="json"),
        "drafter": settings.decode.drafter,
        "data": settings.data.model_dump(mode="json"),
        "prompts": len(bench.prompts),
        "environment": describe_environment().model_dump(),
        "options": vars(arguments) | {"decode": settings.decode.model_dump(mode="json")},
        "by_rank": bench.by_rank,
        "costs": costs,
        "figure_4": asdict(expectation),
        **{f"figure_{n}": [asdict(p) for p in points if p.figure == n] for n in (5, 6, 7)},
    }
    write_file(arguments.out, json.dumps(report, indent=2, default=str) + "\n")
    draw(expectation, costs["mu"], points, title(settings, arguments), arguments.figure)
    print(f"Wrote {arguments.out} and {arguments.figure}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--drafter", required=True, help="folder or Hub name of the drafter")
    parser.add_argument("--data", required=True, help="file or Hub name of the inputs")
    parser.add_argument("--prompts", type=int, default=40, help="inputs to decode (default 40)")
    parser.add_argument(
        "--rank-prompts", type=int, help="other inputs for sequoia (default: as many)"
    )
    parser.add_argument("--nodes", type=int, default=50, help="in figures 4, 6, 7 (default 50)")
    parser.add_argument("--levels", type=int, default=10, help="most levels (default 10)")
    parser.add_argument("--sizes", type=numbers, default=SIZES, help="in figure 5, e.g. 1,25,60")
    parser.add_argument("--deltas", type=numbers, default=DELTAS, help="in figure 6")
    parser.add_argument("--temperatures", type=numbers, default=TEMPERATURES, help="in figure 7")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--out", type=Path, default=Path("opt_tree.json"), help="JSON to write")
    parser.add_argument("--figure", type=Path, default=Path("opt_tree.png"), help="PNG to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in `drafttrain eval`")
    return parser.parse_intermixed_args()


def numbers(text: str) -> tuple[float, ...]:
    """Parses `0,0.2,1` to sorted, distinct numbers. Raises ValueError, which argparse reports."""
    return tuple(sorted({float(number) for number in text.split(",")}))


def read_settings(arguments: argparse.Namespace) -> tuple[EvalConfig, Any]:
    """Reads settings as `drafttrain eval` does, and the rows for sequoia's acceptance by rank.

    Raises ConfigError if no rows are left for the latter.
    """
    flags = {
        "target.path": arguments.target,
        "decode.drafter": arguments.drafter,
        "data.path": arguments.data,
        "data.limit": arguments.prompts,
        "baselines": [],
    }
    settings = load_settings(EvalConfig, None, ["repeats=1", *arguments.overrides], flags)
    ranked = settings.rank_data or settings.data.model_copy(
        update={
            "skip": settings.data.skip + arguments.prompts,
            "limit": arguments.rank_prompts or arguments.prompts,
        }
    )
    settings = settings.model_copy(update={"rank_data": ranked})
    try:
        return settings, load_inputs(ranked, "rank_data")
    except ConfigError as error:
        raise ConfigError(f"{error} (sequoia needs inputs of its own: fewer --prompts?)") from None


def prepare(arguments: argparse.Namespace, settings: EvalConfig, ranked: Any) -> Bench:
    """Loads the pair and measures acceptance by rank."""
    torch.set_num_threads(arguments.threads)
    check_methods(opt_tree(settings.decode, arguments.nodes, 0.0, arguments.levels))
    rows = load_inputs(settings.data)
    pair = load_pair(settings.target, [str(settings.decode.drafter)])
    prompts, _ = read_prompts(pair, rows)
    by_rank = measure_ranks(pair, settings, ranked)
    resamples = draw_resamples(len(prompts), seed=settings.decode.sampling.seed)
    return Bench(arguments, settings, pair, prompts, resamples, by_rank)


def opt_tree(decode: DecodeConfig, nodes: int, delta: float, levels: int) -> DecodeConfig:
    """Returns settings of an opt-tree that stops after a level that gains delta or less."""
    tree = TreeConfig(kind="opt-tree", nodes=nodes)
    stop = StopConfig(kind="gain", delta=delta, max_draft=levels)
    return decode.model_copy(update={"tree": tree, "stop": stop})


@dataclass(frozen=True)
class Variant:
    """A decoding method and its position in a figure."""

    name: str
    value: float
    decode: DecodeConfig


@dataclass(frozen=True)
class Bench:
    """The pair, prompts and settings that all figures share."""

    arguments: argparse.Namespace
    settings: EvalConfig
    pair: Pair
    prompts: Sequence[Prompt]
    resamples: Array
    by_rank: tuple[float, ...]

    @property
    def decode(self) -> DecodeConfig:
        return self.settings.decode

    def sized_trees(self) -> Iterator[Variant]:
        """Yields the trees of figure 5: each kind in each size, EAGLE's in its own size."""
        levels = self.arguments.levels
        for nodes in map(int, self.arguments.sizes):
            yield Variant("opt-tree", nodes, opt_tree(self.decode, nodes, 0.0, levels))
            yield Variant("sequoia", nodes, self._fixed("sequoia", levels, nodes))
            yield Variant("binary", nodes, self._fixed("binary", levels, nodes))
        yield Variant("eagle", EAGLE_NODES, self._fixed("eagle", EAGLE_LEVELS, None))

    def delta_trees(self) -> Iterator[Variant]:
        """Yields the opt-trees of figure 6, the smallest delta first."""
        for delta in self.arguments.deltas:
            decode = opt_tree(self.decode, self.arguments.nodes, delta, self.arguments.levels)
            yield Variant("opt-tree", delta, decode)

    def temperature_trees(self) -> Iterator[Variant]:
        """Yields the opt-trees of figure 7, at the delta of decode.stop.delta or its default."""
        for temperature in self.arguments.temperatures:
            sampling = self.decode.sampling.model_copy(update={"temperature": temperature})
            decode = self.decode.model_copy(update={"sampling": sampling})
            delta, levels = self.decode.stop.delta, self.arguments.levels
            decode = opt_tree(decode, self.arguments.nodes, delta, levels)
            yield Variant("opt-tree", temperature, decode)

    def measure(
        self, figure: int, variants: Iterator[Variant]
    ) -> tuple[list[Point], list[Decoded]]:
        """Decodes interleaved with all variants and, at each temperature, with plain decoding."""
        print(f"figure {figure}:")
        jobs: list[Job] = []
        plain_of: dict[SamplingConfig, int] = {}
        measured: list[tuple[int, Variant, SamplingConfig]] = []
        for variant in variants:
            sampling, method = variant.decode.sampling, build_method(variant.decode, self.pair)
            settings = self.settings.model_copy(update={"decode": variant.decode})
            plain, job = make_jobs(self.pair, [method], settings)
            if sampling not in plain_of:
                plain_of[sampling] = len(jobs)
                jobs.append(plain)
            measured.append((len(jobs), variant, sampling))
            jobs.append(job)
        device = self.pair.model.device
        decoded = run_interleaved(jobs, self.prompts, self.settings, device, progress=True)
        points = [
            self._point(figure, variant, decoded[index], decoded[plain_of[sampling]])
            for index, variant, sampling in measured
        ]
        return points, decoded

    def _fixed(self, kind: str, levels: int, nodes: int | None) -> DecodeConfig:
        given: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
        if kind == "sequoia":
            given["by_rank"] = self.by_rank
        return self.decode.model_copy(
            update={
                "tree": TreeConfig(kind=kind, **given),
                "stop": StopConfig(kind="fixed", k=levels),
            }
        )

    def _point(self, figure: int, variant: Variant, run: Decoded, plain: Decoded) -> Point:
        counts = count_rounds(run.outputs)
        figures = acceptance_figures(counts) | speed_figures(run, [], sampled=True)
        metrics = estimate_all(figures, self.resamples)
        plain_metrics = estimate_all(speed_figures(plain, [], sampled=True), self.resamples)
        speeds = [one["tokens_per_second"] for one in (metrics, plain_metrics)]
        return Point(
            figure=figure,
            method=variant.name,
            value=float(variant.value),
            mean_acceptance_length=metrics["mean_acceptance_length"],
            tokens_per_second=speeds[0],
            speedup=speeds[0].value / speeds[1].value,
            expected_accepted=metrics.get("expected_accepted"),
            passes_per_round=float(counts.passes.sum() / counts.rounds.sum()),
        )


def title(settings: EvalConfig, arguments: argparse.Namespace) -> str:
    temperature = settings.decode.sampling.temperature
    return (
        f"OPT-Trees of at most {arguments.levels} levels, {Path(arguments.drafter).name} for "
        f"{Path(arguments.target).name} on {Path(arguments.data).name}, {arguments.prompts} "
        f"inputs, temperature {temperature:g}; {arguments.nodes} tokens unless given"
    )


def call_costs(run: Decoded) -> dict[str, float]:
    """Mean seconds of a drafter call (including tree growth) and of a target call."""
    rounds = [played for output in run.outputs for played in output.rounds]
    t_draft = sum(r.draft_seconds for r in rounds) / max(1, sum(r.passes for r in rounds))
    t_target = sum(r.target_seconds for r in rounds) / len(rounds)
    return {"t_draft": t_draft, "t_target": t_target, "mu": t_draft / t_target}


if __name__ == "__main__":
    main()
