"""report.json: its schema, and writing it with its samples. Tables and plots read it back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from drafttrain.build.method import Size
from drafttrain.config.base import ConfigError
from drafttrain.config.reading import first_problem
from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.calibration import HeadFacts, OracleCounts
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.metrics import PositionRates
from drafttrain.evaluation.prompts import PromptSet, Skipped
from drafttrain.models.layout import count_parameters
from drafttrain.models.loading import LoadedTarget

Written = TypeVar("Written", bound="Part")
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
    bound: float = GAP_TOLERANCE
    """The gap below which a difference is due to rounding."""

    @property
    def gaps(self) -> list[float]:
        return [difference.gap for difference in self.differences]

    @property
    def unexplained(self) -> int:
        """Differences that rounding does not explain; none should be found."""
        return sum(gap >= self.bound for gap in self.gaps)

    @property
    def holds(self) -> bool:
        """Whether all outputs are equal, but for floating-point ties."""
        return self.unexplained == 0


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


class BatchResult(Part):
    """One method on all prompts with several sequences at once, at most `batch_size`."""

    batch_size: int
    metrics: dict[str, Estimate]
    """tokens_per_second of whole waves; ms_per_token, the median over sequences from entering to
    their end; speedup, ... over the same of the others at this batch size."""
    differing: int | None = None
    """Sequences whose tokens differ from those at batch size 1; None where they may: a baseline
    that samples a batch from one stream."""
    parity: Parity | None = None
    """Of lossless greedy methods, above batch size 1: where and why they differ from it."""
    memory_bytes: int | None = None
    """Peak memory of a wave beyond what was held before it; `Report.memory` says of which kind."""


class Run(Part):
    """One method on all prompts."""

    name: str
    """DRAFTER STOP VERIFIER; `plain` is plain decoding in the same engine."""
    kind: Literal["plain", "method", "baseline"]
    method: str
    """What it is, without sizes: plain; chain, cascade, or the kind of its trees (rsd-s, opt-tree,
    ...; `opt-tree,head` where a head scores nodes); generate, beam or assisted, Transformers'
    own."""
    sizes: dict[str, Size] = {}
    """How large its drafts are: depth and nodes (most levels, most draft tokens), and k, max_draft,
    width, branching, drafters or increments, as the method goes by them; beams of beam search."""
    drafter: str | None = None
    other: str | None = None
    """Which of `others` it is; None: the drafter that is measured, plain decoding, a baseline."""
    parameters: int | None = None
    """Of all models that draft."""
    compared_with: str | None = None
    """The run of the first drafter that `..._difference` of the others is to."""
    stop: str | None = None
    verifier: str | None = None
    sampling: dict[str, float]
    lossless: bool
    settings: dict[str, float] = {}
    """What a sweep varies: k, h, ..., beta, tau, rule, alpha."""
    metrics: dict[str, Estimate]
    acceptance_rate_per_position: PositionRates | None = None
    parity: list[Parity] = []
    totals: dict[str, int | float] = {}
    """Prompts, tokens, rounds, drafted, accepted, discarded, passes; not whole where rounds are
    expected, not played (mode teacher-forced, sampling)."""
    time: TimeShares | None = None
    costs: CallCosts | None = None
    batches: list[BatchResult] = []
    """By batch size, 1 first, where several were measured. All else here is of batch size 1."""

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
    prompts: int
    references: int
    """Prompts that have a reference."""
    skipped: list[Skipped] = []


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

    def standings(self, batch_size: int) -> dict[str, Tried]:
        """Each candidate in the last rung that decoded it: who stayed longest, fastest first."""
        found: dict[str, Tried] = {}
        for rung in reversed(self.rungs):
            if rung.batch_size == batch_size:
                found |= {name: one for name, one in rung.candidates.items() if name not in found}
        return found


class Report(Part):
    """What `drafttrain eval` or `drafttrain tune` measured."""

    mode: Literal["decode", "teacher-forced"]
    target: TargetFacts
    data: DataFacts
    environment: Environment
    options: dict[str, Any]
    """Seed, maximal length, repeats, resamples."""
    runs: list[Run]
    search: Search | None = None
    """Of `drafttrain tune`: how the methods were chosen."""
    memory: Literal["allocated", "resident"] | None = None
    """What memory of batches counts: torch's allocations on the device, or resident memory of the
    process, which is coarse."""

    @property
    def machine(self) -> str:
        """The device that decoded, and on a CPU its threads."""
        if "cuda" in self.target.device and self.environment.gpu:
            return self.environment.gpu
        return f"{self.environment.cpu}, {self.environment.threads} threads"

    def run(self, name: str) -> Run:
        """The run of that name. Raises ValueError naming those there are."""
        for run in self.runs:
            if run.name == name:
                return run
        names = ", ".join(repr(run.name) for run in self.runs)
        raise ValueError(f"the report has no run {name!r}; it has {names}")


def target_facts(target: LoadedTarget) -> TargetFacts:
    return TargetFacts(
        path=target.path,
        parameters=count_parameters(target.model),
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
    )


def data_facts(inputs: PromptSet) -> DataFacts:
    return DataFacts(
        path=inputs.path,
        prompts=len(inputs.prompts),
        references=sum(prompt.reference is not None for prompt in inputs.prompts),
        skipped=inputs.skipped,
    )


def read_report(path: Path) -> Report:
    """Read report.json. Raises ValueError for a file that is none."""
    return read_json(Report, path, "drafttrain eval")


def read_json(kind: type[Written], path: Path, command: str) -> Written:
    """Read what a command measured. Raises ValueError for a file that holds nothing of the kind."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return kind.model_validate(values)
    except OSError as error:
        problem = str(error.strerror).lower()
    except ValidationError as error:
        problem = first_problem(error)
    except ValueError as error:
        problem = str(error)
    raise ValueError(
        f"{path} is no report of {command} ({problem}); make one with `{command} --report FILE`"
    )


def write_json(report: Part, path: Path) -> None:
    """Write what was measured, whole or not at all."""
    text = json.dumps(report.model_dump(mode="json"), indent=2, ensure_ascii=False)
    write_text(path, text + "\n")


def write_samples(samples: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write samples.jsonl, one prompt a line, whole or not at all."""
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in samples))


def write_text(path: Path, text: str) -> None:
    """Write a file, and the folders above it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with renamed_when_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def samples_path(report: Path) -> Path:
    """samples.jsonl beside report.json; NAME.samples.jsonl beside NAME.json."""
    name = "samples.jsonl" if report.stem == "report" else f"{report.stem}.samples.jsonl"
    return report.with_name(name)


def plot_path(report: Path) -> Path:
    """report.png beside report.json."""
    return report.with_suffix(".png")


def check_new_file(file: Path, setting: str, suffixes: tuple[str, ...]) -> None:
    """Raise ConfigError where a file of this kind cannot be written. setting: what names it."""
    if file.suffix not in suffixes or file.is_dir():
        raise ConfigError(
            f"{setting} = {str(file)!r} is no file name ending in {suffixes[0]}; give one"
        )
    nearest = next(parent for parent in file.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{setting} = {str(file)!r}: {str(nearest)!r} is a file, not a folder")
