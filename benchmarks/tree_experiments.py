"""Compare draft trees at equal depth and at equal budget (RSD, Jeon et al. 2024, Exp1 and Exp2).

    python benchmarks/tree_experiments.py --methods sd,spectr,specinfer,rsd-c,rsd-s \\
        --depth 2,3,4,5 --temperature 1 --target MODEL --drafter MODEL --data FILE
    python benchmarks/tree_experiments.py --methods sd,rsd-c,rsd-s --budget 6,10,14,21,30

Measures all trees that the paper (Appendix C.3) uses at a depth or a budget in one interleaved run
of `drafttrain eval`. Other options and key=value settings are those of that command, and it writes
the same report, samples and plot. The best tree of each method at each depth or budget is written
as Markdown next to the report. Without --target and --drafter: the newest run in checkpoints/, on
its own held-out rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttrain.commands.eval import measure
from drafttrain.commands.shell import quiet_libraries
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.reading import check_settings, merge_values, validate_settings
from drafttrain.config.runs import fill_data, fill_from_run
from drafttrain.data.shards.writing import write_file
from drafttrain.evaluation.report import Report, Run, read_report

from tree_grids import METHODS, expand_methods


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    quiet_libraries()
    try:
        settings = read_settings(given)
        variants = read_methods(given, settings)
        measure(settings, given.dry_run, variants)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if not given.dry_run:
        report = read_report(given.report)
        groups = best_trees(report, "nodes" if given.budget else "depth")
        table = [f"| {size} | {run.name} | {shown(run)} |" for size, run in groups]
        head = ["| size | best of each method | mean acceptance length |", "| --- | --- | --- |"]
        write_file(given.report.with_suffix(".md"), "\n".join([*head, *table]) + "\n")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--methods", type=listed, default=[], metavar="NAME,NAME", help=", ".join(METHODS)
    )
    parser.add_argument(
        "--depth", type=counts, default=[], metavar="INT,INT", help="levels of the trees (Exp1)"
    )
    parser.add_argument(
        "--budget", type=counts, default=[], metavar="INT,INT", help="tokens of the trees (Exp2)"
    )
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    parser.add_argument("--target", help="folder or Hub name of the target")
    parser.add_argument("--drafter", help="folder or Hub name of the drafter")
    parser.add_argument("--data", help="file or Hub name of the inputs")
    parser.add_argument("--limit", help="most inputs to use")
    parser.add_argument("--temperature", help="0: greedy; above 0: sampling")
    parser.add_argument("--seed", help="seed of all random choices")
    parser.add_argument(
        "--report", type=Path, default=Path("trees.json"), help="default: trees.json"
    )
    parser.add_argument("--dry-run", action="store_true", help="check without reading weights")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as in `drafttrain eval`")
    return parser.parse_intermixed_args(arguments)


def listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def counts(text: str) -> list[int]:
    """Parses `2,3,4` to positive integers. Raises ValueError, which argparse reports."""
    numbers = [int(part) for part in listed(text)]
    if min(numbers, default=1) < 1:
        raise ValueError(text)
    return numbers


def read_settings(given: argparse.Namespace) -> EvalConfig:
    """Reads settings as `drafttrain eval` does; from a run it takes only target, drafter and
    held-out rows.

    Raises ConfigError like that command.
    """
    flags = {
        "target.path": given.target,
        "decode.drafter": given.drafter,
        "data.path": given.data,
        "data.limit": given.limit,
        "decode.sampling.temperature": given.temperature,
        "decode.sampling.seed": given.seed,
        "report": str(given.report),
    }
    values: dict[str, Any] = merge_values(given.config, given.overrides, flags)
    check_settings(EvalConfig, values)
    filled = fill_data(fill_from_run(values))
    decode = dict(values.get("decode") or {})  # the run's draft length is not used
    return validate_settings(
        EvalConfig, filled | {"decode": decode | {"drafter": filled["decode"]["drafter"]}}
    )


def read_methods(given: argparse.Namespace, settings: EvalConfig) -> list[DecodeConfig]:
    """Returns the given methods. Raises ConfigError for settings that do not fit them."""
    if settings.sweep:
        raise ConfigError("methods and sweep are both given; measure them one after the other")
    if settings.mode != "decode":
        raise ConfigError(f"methods are compared by decoding, not mode={settings.mode}")
    return expand_methods(settings.decode, given.methods, given.depth, given.budget)


def best_trees(report: Report, size: str) -> list[tuple[int, Run]]:
    """Returns the tree with the longest mean acceptance length for each size and method."""
    best: dict[tuple[int, str, str], Run] = {}
    for run in report.runs:
        if run.kind == "method" and run.batch_size == 1:
            key = (int(run.sizes[size]), run.method, str(run.verifier))
            if key not in best or acceptance(run) > acceptance(best[key]):
                best[key] = run
    return [(key[0], run) for key, run in sorted(best.items(), key=lambda item: item[0][0])]


def acceptance(run: Run) -> float:
    return run.metrics["mean_acceptance_length"].value


def shown(run: Run) -> str:
    length = run.metrics["mean_acceptance_length"]
    return f"{length.value:.2f} ({length.low:.2f}–{length.high:.2f})"


if __name__ == "__main__":
    main()
