"""The schema of report.json, which tables, plots and pages are made from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from pydantic import BaseModel, ValidationError

from drafttrain import __version__
from drafttrain.config.base import ConfigError, counted
from drafttrain.config.command_line import describe_command
from drafttrain.config.inputs import DataConfig
from drafttrain.config.reading import first_problem
from drafttrain.data.shards.writing import check_writable
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.calibration import HeadFacts, OracleCounts
from drafttrain.evaluation.metrics import CallCosts, PositionRates
from drafttrain.evaluation.prompts import Prompt, Skipped

GAP_TOLERANCE = 1e-4
"""Top-2 logit gap below which a greedy choice is a floating-point tie."""


PACKAGES = ("torch", "transformers", "datasets", "sacrebleu", "rouge-score")


class Part(BaseModel, frozen=True):
    """A part of a report."""


class Environment(Part):
    """The machine, command and versions of the timings."""

    date: str
    command: str
    """The command line, without private folders."""
    cpu: str
    cores: int
    threads: int
    """torch's CPU threads."""
    gpu: str | None
    python: str
    versions: dict[str, str]
    commit: str | None
    """Commit of drafttrain's repository, `-dirty` with local changes; None if installed."""


def describe_environment() -> Environment:
    """Returns the environment of this process."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=describe_command(sys.argv),
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        versions={"drafttrain": __version__} | {name: version(name) for name in PACKAGES},
        commit=_commit(Path(__file__).parents[2]),
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit(repository: Path) -> str | None:
    if not (repository / ".git").exists():  # installed, or in another repository
        return None
    command = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


class Difference(Part):
    """The first difference between two outputs that should be equal."""

    row: int
    position: int
    gap: float
    """Plain decoding's top-2 logit gap at this position."""


class Parity(Part):
    """Token-by-token comparison of a lossless greedy run with another run."""

    against: str
    compared: int
    identical: int
    differences: list[Difference]
    bound: float = GAP_TOLERANCE
    """The gap below which a difference is due to rounding."""

    @property
    def unexplained(self) -> int:
        """Number of differences that rounding does not explain; it should be 0."""
        return sum(one.gap >= self.bound for one in self.differences)


class Run(Part):
    """One method on all prompts at one batch size."""

    name: str
    """DRAFTER STOP VERIFIER; `plain` is plain decoding in the same engine."""
    kind: Literal["plain", "method", "baseline"]
    method: str
    """The method without sizes: plain; chain, cascade or the tree kind (rsd-s, opt-tree, ...);
    generate, beam or assisted for Transformers' methods."""
    batch_size: int = 1
    """Maximal number of sequences per batch. Above 1 only speed, parity and memory are measured."""
    sizes: dict[str, int] = {}
    """Maximal size of a draft: depth (levels) and nodes (draft tokens)."""
    drafter: str | None = None
    other: str | None = None
    """Its name in `others`; None: a method of the main drafter, plain decoding or a baseline."""
    called: str | None = None
    """Display name of the drafter and tree; None: the drafter's kind is shown."""
    parameters: int | None = None
    """Parameters of all models that draft."""
    stop: str | None = None
    verifier: str | None = None
    sampling: dict[str, float]
    lossless: bool
    settings: dict[str, float] = {}
    """The settings that a sweep can vary: k, h, ..., beta, tau, rule, alpha."""
    metrics: dict[str, Estimate]
    acceptance_rate_per_position: PositionRates | None = None
    parity: list[Parity] = []
    """Lossless greedy methods compared with plain decoding and `generate`; above batch size 1 with
    batch size 1."""
    memory_bytes: int | None = None
    """Peak growth of torch's memory while decoding a group on a CUDA device; only if several batch
    sizes were measured."""
    totals: dict[str, int | float] = {}
    """Prompts, tokens, rounds, drafted, accepted, discarded, passes; not integers if they are
    expectations (teacher-forced with sampling)."""
    time: dict[str, float] | None = None
    """Shares of wall-clock time: draft, target, other."""
    costs: CallCosts | None = None

    @property
    def lossy(self) -> bool:
        """Whether it is a method that is not lossless; baselines are never marked."""
        return self.kind == "method" and not self.lossless


class TargetFacts(Part):
    path: str
    parameters: int
    dtype: str
    device: str


class DataFacts(Part):
    path: str
    columns: str | None = None
    """The columns that inputs and references were read from."""
    prompts: int
    references: int
    """Number of prompts with a reference."""
    skipped: list[Skipped] = []
    cut_by_positions: int = 0
    """Number of plain outputs that ended because the target has no more positions."""

    @staticmethod
    def of(
        data: DataConfig, rows: Dataset, prompts: Sequence[Prompt], skipped: list[Skipped]
    ) -> DataFacts:
        return DataFacts(
            path=str(data.path),
            columns=rows.info.description or None,
            prompts=len(prompts),
            references=sum(prompt.reference is not None for prompt in prompts),
            skipped=skipped,
        )


class Tried(Part):
    """Result of a candidate of `drafttrain tune` on all prompts it has decoded at a batch size."""

    tokens_per_second: Estimate
    against_best: Estimate
    """Its speed divided by the fastest candidate's, paired by prompt."""
    discard_rate: float
    verification_rate: float
    """Discarded draft tokens and target calls per token (SpecDec++ Eq. 2.2, 2.3)."""
    stays: bool
    """Whether it enters the next rung."""


class Rung(Part):
    """One comparison of the remaining candidates; the slower half is then eliminated."""

    batch_size: int
    prompts: int
    """Number of prompts that each candidate has decoded so far."""
    tokens: float
    """Mean output length in tokens."""
    candidates: dict[str, Tried]
    """Results by candidate name, fastest first."""


class Choice(Part):
    """The fastest candidates at a batch size."""

    batch_size: int
    best: str
    """The fastest candidate; `plain` is plain decoding."""
    best_chain: str | None
    """The fastest chain of the drafter, without tree or cascade."""
    best_fixed: str | None
    """The fastest chain of fixed length."""
    best_head: str | None


class Search(Part):
    """How `drafttrain tune` chose. The report's runs are final measurements on other prompts."""

    drafter: str
    candidates: dict[str, dict[str, Any]]
    """Decoding settings by candidate name, without drafter and sampling."""
    data: DataFacts
    """The prompts used for the choice."""
    minutes: float
    rungs: list[Rung]
    choices: list[Choice]
    """One per batch size, in ascending order."""
    t_draft: float
    t_target: float
    """Mean seconds of a draft token and of a target call."""
    threshold: float | None = None
    """h by SpecDec++ Theorem 3.1, if it applies."""
    heads: list[HeadFacts] = []
    """Calibration of heads on held-out draft tokens."""
    oracle: OracleCounts | None = None
    """The oracle of Lemma 2.1 on plain outputs; greedy decoding only."""


def standings(rungs: Sequence[Rung], batch_size: int) -> dict[str, tuple[Rung, Tried]]:
    """Returns the last rung of each candidate and its result there, ordered by how long candidates
    stayed, then by speed."""
    last: dict[str, tuple[Rung, Tried]] = {}
    for rung in reversed(rungs):
        if rung.batch_size == batch_size:
            for name, one in rung.candidates.items():
                last.setdefault(name, (rung, one))
    return last


class Report(Part):
    """The results of `drafttrain eval` or `drafttrain tune`."""

    mode: Literal["decode", "teacher-forced"]
    target: TargetFacts
    data: DataFacts
    environment: Environment
    options: dict[str, Any]
    """Settings such as seed, maximal length and repeats."""
    runs: list[Run]
    search: Search | None = None
    """None in reports of `eval`."""
    partial: str | None = None
    """What was done before an interruption; None: the report is complete."""

    @property
    def machine(self) -> str:
        """Name of the GPU, or of the CPU with its number of threads."""
        if "cuda" in self.target.device and self.environment.gpu:
            return self.environment.gpu
        return f"{self.environment.cpu}, {counted(self.environment.threads, 'thread')}"

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of inputs and of methods, which count once per batch size."""
        return self.data.prompts, sum(run.kind == "method" for run in self.runs)

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({run.batch_size for run in self.runs})

    def run(self, name: str, batch_size: int = 1) -> Run:
        """Returns the run of that name. Raises ValueError listing the existing names."""
        runs = {run.name: run for run in self.runs if run.batch_size == batch_size}
        if name not in runs:
            raise ValueError(f"the report has no run {name!r}; it has {', '.join(map(repr, runs))}")
        return runs[name]


def read_report(path: Path) -> Report:
    """Reads a report. Raises ValueError for a file that cannot be read or is not a report."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        problem = error.strerror.lower()
    except ValidationError as error:
        problem = first_problem(error)
    raise ValueError(
        f"{path} is no report of drafttrain eval ({problem}); make one with `drafttrain eval "
        "--report FILE`"
    )


def check_report_file(file: Path) -> None:
    """Raises ConfigError if no report can be written to `file`, or if `file` is something else."""
    if file.suffix != ".json" or file.is_dir():
        raise ConfigError(f"report = {str(file)!r} is no file name ending in .json; give one")
    check_writable(file.parent, f"report = {str(file)!r}")
    if file.exists():
        try:
            read_report(file)
        except ValueError:
            raise ConfigError(
                f"report = {str(file)!r} exists and is no report of this version; delete it, or "
                "give another file"
            ) from None
