"""report.json: its schema, and writing it with its samples. Tables and plots read it back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.metrics import PositionRates

TreeAxis = Literal["depth", "nodes"]
"""Settings by which trees are compared: most levels (RSD Exp1), drafted tokens (Exp2)."""
GAP_TOLERANCE = 1e-4
"""Top-2 logit gap below which a greedy choice is a floating-point tie."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True)


class Difference(Part):
    """The first token at which an output leaves the one it should equal."""

    row: int
    position: int
    gap: float
    """Plain decoding's top-2 logit gap there."""


class Parity(Part):
    """Token-for-token comparison of a lossless greedy run with another one."""

    against: str
    compared: int
    identical: int
    differences: list[Difference]

    @property
    def holds(self) -> bool:
        """Whether all outputs are equal, but for floating-point ties."""
        return all(difference.gap < GAP_TOLERANCE for difference in self.differences)


class TimeShares(Part):
    """Where the time of decoding went, shares of its wall clock."""

    draft: float
    target: float
    other: float
    """Encoding included."""


class CallCosts(Part):
    """What a call of each drafter costs, in target calls, and how many it made; by its name."""

    parameters: dict[str, float]
    """Parameters over the target's, on which `mbsu` rests."""
    measured: dict[str, float]
    """Mean seconds over those of a call of the target as it decodes plainly, for `swi`."""
    calls: dict[str, int]


class Run(Part):
    """One method on all prompts."""

    name: str
    """DRAFTER STOP VERIFIER; `plain` is plain decoding in the same engine."""
    kind: Literal["plain", "method", "baseline"]
    drafter: str | None
    stop: str | None
    verifier: str | None
    sampling: dict[str, float]
    lossless: bool
    settings: dict[str, float]
    """What a sweep varies: k, beta, tau; where trees are compared: depth and nodes of a draft."""
    metrics: dict[str, Estimate]
    by_position: PositionRates | None = None
    parity: list[Parity] = []
    totals: dict[str, int] = {}
    """Prompts, tokens, rounds, drafted, accepted, discarded, passes."""
    time: TimeShares | None = None
    costs: CallCosts | None = None
    speedup_quantiles: dict[str, list[float]] = {}
    """Of the speed-ups of single inputs, by the metric's name: the least, that of 5 %, 10 %, ...
    and the greatest. Greedy runs only: sampled outputs differ in length by randomness."""

    @property
    def lossy(self) -> bool:
        """Whether to mark the run as lossy (baselines promise nothing)."""
        return self.kind == "method" and not self.lossless


class TargetFacts(Part):
    path: str
    parameters: int
    dtype: str
    device: str


class SkippedRow(Part):
    row: int
    reason: str


class DataFacts(Part):
    path: str
    prompts: int
    references: int
    """Prompts that have a reference."""
    skipped: list[SkippedRow] = []


class Report(Part):
    """What `drafttrain eval` measured."""

    mode: Literal["decode", "teacher-forced"]
    target: TargetFacts
    data: DataFacts
    environment: Environment
    options: dict[str, Any]
    """Seed, maximal length, repeats, resamples."""
    runs: list[Run]
    compared_by: TreeAxis | None = None
    """Where trees are compared: the setting that those of a group share."""

    def run(self, name: str) -> Run:
        """The run of that name. Raises ValueError naming those there are."""
        for run in self.runs:
            if run.name == name:
                return run
        names = ", ".join(repr(run.name) for run in self.runs)
        raise ValueError(f"the report has no run {name!r}; it has {names}")


def read_report(path: Path) -> Report:
    """Read report.json. Raises ValueError for a file that is none."""
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"{path} is no report of drafttrain ({where}: {first['msg']}); "
            "make one with `drafttrain eval --report FILE`"
        ) from None


def write_report(report: Report, path: Path) -> None:
    """Write report.json whole or not at all."""
    text = json.dumps(report.model_dump(mode="json"), indent=2, ensure_ascii=False)
    write_text(path, text + "\n")


def write_samples(samples: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write samples.jsonl, one prompt a line, whole or not at all."""
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in samples))


def samples_path(report: Path) -> Path:
    """samples.jsonl beside report.json; NAME.samples.jsonl beside NAME.json."""
    name = "samples.jsonl" if report.stem == "report" else f"{report.stem}.samples.jsonl"
    return report.with_name(name)


def plot_path(report: Path) -> Path:
    """report.png beside report.json."""
    return report.with_suffix(".png")


def write_text(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
