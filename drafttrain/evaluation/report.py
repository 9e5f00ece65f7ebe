"""report.json: its schema, and writing it with its samples. Tables and plots read it back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from pydantic import BaseModel, ConfigDict, ValidationError

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


class Part(BaseModel):
    model_config = ConfigDict(frozen=True)


PACKAGES = ("torch", "transformers", "datasets", "sacrebleu", "rouge-score")


class Environment(Part):
    """What a reader needs to judge a timing."""

    date: str
    command: str
    """As others would type it: without private folders."""
    cpu: str
    cores: int
    threads: int
    """Threads that torch computes with."""
    gpu: str | None
    python: str
    versions: dict[str, str]
    commit: str | None
    """Commit of drafttrain's own repository, `-dirty` with local changes; None if installed."""


def describe_environment() -> Environment:
    """The environment of this process."""
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
    if not (repository / ".git").exists():  # installed, or inside somebody else's repository
        return None
    command = ["git", "-C", str(repository), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


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
    bound: float = GAP_TOLERANCE
    """The gap below which a difference is due to rounding."""

    @property
    def unexplained(self) -> int:
        """Differences that rounding does not explain; none should be found."""
        return sum(one.gap >= self.bound for one in self.differences)


class Run(Part):
    """One method on all prompts at one batch size."""

    name: str
    """DRAFTER STOP VERIFIER; `plain` is plain decoding in the same engine."""
    kind: Literal["plain", "method", "baseline"]
    method: str
    """What it is, without sizes: plain; chain, cascade, or the kind of its trees (rsd-s, opt-tree,
    ...); generate, beam or assisted, Transformers' own."""
    batch_size: int = 1
    """Sequences decoded at once, at most. Above 1 only speed, parity and memory are measured."""
    sizes: dict[str, int] = {}
    """How large its drafts are: depth (most levels) and nodes (most draft tokens)."""
    drafter: str | None = None
    other: str | None = None
    """Which of `others` it is; None: the drafter that is measured, plain decoding, a baseline."""
    called: str | None = None
    """The drafter, or the tree of it, by the user's name; None: by its kind."""
    parameters: int | None = None
    """Of all models that draft."""
    stop: str | None = None
    verifier: str | None = None
    sampling: dict[str, float]
    lossless: bool
    settings: dict[str, float] = {}
    """What a sweep varies: k, h, ..., beta, tau, rule, alpha."""
    metrics: dict[str, Estimate]
    acceptance_rate_per_position: PositionRates | None = None
    parity: list[Parity] = []
    """Of lossless greedy methods: against plain decoding and `generate`; above batch size 1 against
    batch size 1."""
    memory_bytes: int | None = None
    """Peak memory of a wave on a CUDA device beyond what torch had allocated before it, where
    several batch sizes were measured."""
    totals: dict[str, int | float] = {}
    """Prompts, tokens, rounds, drafted, accepted, discarded, passes; not whole where rounds are
    expected, not played (mode teacher-forced, sampling)."""
    time: dict[str, float] | None = None
    """Shares of the wall clock: draft, target, other."""
    costs: CallCosts | None = None

    @property
    def lossy(self) -> bool:
        """Whether to mark the run as lossy (baselines promise nothing)."""
        return self.kind == "method" and not self.lossless


class TargetFacts(Part):
    path: str
    parameters: int
    dtype: str
    device: str


class DataFacts(Part):
    path: str
    columns: str | None = None
    """Which columns the inputs and references were read from."""
    prompts: int
    references: int
    """Prompts that have a reference."""
    skipped: list[Skipped] = []
    cut_by_positions: int = 0
    """Plain outputs that ended, before EOS and max_new_tokens, where the target's positions do."""

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
    """A candidate of `drafttrain tune` on all prompts that it has decoded at a batch size."""

    tokens_per_second: Estimate
    against_best: Estimate
    """Its speed over that of the fastest one, paired by prompt."""
    discard_rate: float
    verification_rate: float
    """Discarded draft tokens and target calls per token (SpecDec++ Eq. 2.2, 2.3)."""
    stays: bool
    """Whether it is decoded further."""


class Rung(Part):
    """A comparison of the candidates that were left; afterwards the slower half left."""

    batch_size: int
    prompts: int
    """Decoded so far by each."""
    tokens: float
    """Mean tokens of an output."""
    candidates: dict[str, Tried]
    """The fastest first."""


class Choice(Part):
    """The fastest candidates at a batch size."""

    batch_size: int
    best: str
    """`plain`: nothing is drafted."""
    best_chain: str | None
    """The fastest chain of the drafter alone, which every program can draft."""
    best_fixed: str | None
    """The fastest one of fixed length."""
    best_head: str | None


class Search(Part):
    """How `drafttrain tune` chose among candidates; the runs of the report are the final figures,
    on other prompts."""

    drafter: str
    candidates: dict[str, dict[str, Any]]
    """Settings of decoding, without drafter and sampling, by name."""
    data: DataFacts
    """The prompts to choose on."""
    minutes: float
    rungs: list[Rung]
    choices: list[Choice]
    """By batch size, rising."""
    t_draft: float
    t_target: float
    """Mean seconds of a draft token and of a target call."""
    threshold: float | None = None
    """h by SpecDec++ Theorem 3.1."""
    heads: list[HeadFacts] = []
    """Calibration on held-out draft tokens."""
    oracle: OracleCounts | None = None
    """Lemma 2.1, along the plain outputs of the final figures; greedy decoding only."""


def standings(rungs: Sequence[Rung], batch_size: int) -> dict[str, tuple[Rung, Tried]]:
    """The last rung that decoded each candidate, and its speed there: who stayed longest first,
    of these the fastest."""
    found: dict[str, tuple[Rung, Tried]] = {}
    for rung in reversed(rungs):
        if rung.batch_size == batch_size:
            for name, one in rung.candidates.items():
                found.setdefault(name, (rung, one))
    return found


class Report(Part):
    """What `drafttrain eval` or `drafttrain tune` measured."""

    mode: Literal["decode", "teacher-forced"]
    target: TargetFacts
    data: DataFacts
    environment: Environment
    options: dict[str, Any]
    """Seed, maximal length, repeats."""
    runs: list[Run]
    search: Search | None = None
    """Of `drafttrain tune`: how the methods were chosen."""
    partial: str | None = None
    """How far it came, where it was interrupted; None: it is whole."""

    @property
    def machine(self) -> str:
        """The device that decoded, and on a CPU its threads."""
        if "cuda" in self.target.device and self.environment.gpu:
            return self.environment.gpu
        return f"{self.environment.cpu}, {counted(self.environment.threads, 'thread')}"

    @property
    def size(self) -> tuple[int, int]:
        """Inputs, and methods; these count once at each batch size."""
        return self.data.prompts, sum(run.kind == "method" for run in self.runs)

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({run.batch_size for run in self.runs})

    def run(self, name: str, batch_size: int = 1) -> Run:
        """The run of that name. Raises ValueError naming those there are."""
        own = [run for run in self.runs if run.batch_size == batch_size]
        for run in own:
            if run.name == name:
                return run
        names = ", ".join(repr(run.name) for run in own)
        raise ValueError(f"the report has no run {name!r}; it has {names}")


def read_report(path: Path) -> Report:
    """Read report.json. Raises ValueError for a file that is none."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        problem = (
            first_problem(error) if isinstance(error, ValidationError) else error.strerror.lower()
        )
    raise ValueError(
        f"{path} is no report of drafttrain eval ({problem}); make one with `drafttrain eval "
        "--report FILE`"
    )


def check_report_file(file: Path) -> None:
    """Raises ConfigError where a report cannot be written, or where another file would be lost."""
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
