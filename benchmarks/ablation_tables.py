"""Facts of trained variants, kept as JSON, and the tables made from them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from drafttrain.build.method import Method
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    draw_resamples,
    estimate_quotient,
    estimate_ratio,
    with_interval,
)
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.metrics import count_positions, count_rounds, identical
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import write_text
from drafttrain.evaluation.runner import Decoded, make_jobs, run_interleaved
from drafttrain.evaluation.summary import token_rate
from drafttrain.models.loading import LoadedTarget
from drafttrain.models.spec_drafter.model import SpecDrafter

RESAMPLES = 1000


class Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Trained(Facts):
    """How a variant was trained."""

    settings: dict[str, Any]
    seconds: float
    """Of training, data and checkpoints included, warm-up and start not."""
    seconds_per_step: float
    """Measured in the warm-up."""
    steps: int
    parameters: int
    rows: int


class Case(Facts):
    """What a variant did at one draft length and temperature."""

    k: int
    temperature: float
    tokens: list[int]
    """Of each sentence."""
    rounds: list[int]
    """Of each sentence."""
    accepted: list[int]
    """Rounds that accepted position 1, 2, ..., over all sentences."""
    reached: list[int]
    """Rounds that drafted the position and accepted all before it."""
    draft_ms: float
    """Median over the rounds of the timed sentences."""
    verify_ms: float
    """Target call and verification; median likewise."""
    plain_ms: float
    """A token of plain decoding; median over the same sentences, interleaved."""
    speedup: float
    """Time of plain decoding over this one's, of the timed sentences."""
    speedup_low: float
    speedup_high: float
    identical: float | None
    """Greedy: share of the timed sentences that are plain decoding's, token for token."""

    @property
    def conditional(self) -> list[float]:
        """Acceptance at each position, of the rounds that reached it."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return [accepted / max(reached, 1) for accepted, reached in pairs]


class Measured(Facts):
    """What a variant is worth."""

    cases: list[Case]
    environment: dict[str, Any]

    def covers(self, wanted: Sequence[tuple[int, float]], prompts: int) -> bool:
        found = [(case.k, case.temperature) for case in self.cases]
        return found == list(wanted) and len(self.cases[0].tokens) == prompts


Kind = TypeVar("Kind", bound=Facts)


def read_facts(path: Path, kind: type[Kind]) -> Kind | None:
    """None where there is no such file yet."""
    return kind.model_validate_json(path.read_bytes()) if path.is_file() else None


def write_facts(path: Path, facts: Facts) -> None:
    write_text(path, facts.model_dump_json(indent=1) + "\n")


def measure_drafter(
    target: LoadedTarget,
    model: CachedModel,
    drafter: SpecDrafter,
    prompts: Sequence[Prompt],
    cases: Sequence[tuple[int, float]],
    timed: int,
) -> Measured:
    """Decode all prompts at every (k, temperature); the first `timed` beside plain decoding."""
    found: list[Case] = []
    for temperature in dict.fromkeys(temperature for _, temperature in cases):
        sampling = Sampling(temperature)
        verifier = GreedyMatch() if sampling.greedy else RejectionSampling()
        lengths = [k for k, wanted in cases if wanted == temperature]
        methods = [Method(BlockDrafter(drafter), FixedLength(k), verifier) for k in lengths]
        options = EvaluationOptions(sampling=sampling, baselines=(), repeats=1)
        first, rest = prompts[:timed], prompts[timed:]
        jobs = make_jobs(target, model, methods, first, options)
        plain, *timed_runs = run_interleaved(jobs, len(first), options, model.device)
        jobs = make_jobs(target, model, methods, rest, options)[1:]
        others = run_interleaved(jobs, len(rest), options, model.device) if rest else []
        for i, (k, run) in enumerate(zip(lengths, timed_runs, strict=True)):
            outputs = run.outputs + (others[i].outputs if rest else [])
            found.append(summarise(k, temperature, outputs, run, plain))
    return Measured(cases=found, environment=describe_environment().model_dump())


def summarise(
    k: int, temperature: float, outputs: Sequence[Output], run: Decoded, plain: Decoded
) -> Case:
    """outputs: of all prompts; run and plain: of the timed ones."""
    counts, positions = count_rounds(outputs), count_positions(outputs)
    rounds = [round for output in run.outputs for round in output.rounds if round.drafted]
    calls = [round for output in plain.outputs for round in output.rounds]
    speedup = speed_over(plain, run, greedy=temperature == 0.0)
    same = float(identical(run.outputs, plain.outputs).mean()) if temperature == 0.0 else None
    return Case(
        k=k,
        temperature=temperature,
        tokens=counts.tokens.astype(int).tolist(),
        rounds=counts.rounds.astype(int).tolist(),
        accepted=positions.accepted.sum(axis=0).astype(int).tolist(),
        reached=positions.reached.sum(axis=0).astype(int).tolist(),
        draft_ms=1e3 * float(np.median([round.draft_seconds for round in rounds])),
        verify_ms=1e3 * float(np.median([round.target_seconds for round in rounds])),
        plain_ms=1e3 * float(np.median([round.target_seconds for round in calls])),
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        identical=same,
    )


def speed_over(plain: Decoded, run: Decoded, greedy: bool) -> Estimate:
    """Plain decoding's time over the run's; tokens a second compared where they are sampled."""
    resamples = draw_resamples(len(plain.outputs), RESAMPLES)
    if greedy:
        found = estimate_ratio(Ratio(plain.median_seconds, run.median_seconds), resamples)
    else:
        found = estimate_quotient(token_rate(run), token_rate(plain), resamples)
    assert found is not None
    return found


def write_report(folder: Path, names: Sequence[str], baseline: str) -> str:
    """ablations.json and ablations.md in the folder, of the variants that are done; the table."""
    done = {}
    for name in names:
        trained = read_facts(folder / name / "trained.json", Trained)
        measured = read_facts(folder / name / "measured.json", Measured)
        if trained is not None and measured is not None:
            done[name] = (trained, measured)
    table = make_table(done, baseline)
    report = {
        name: {"trained": trained.model_dump(), "measured": measured.model_dump()}
        | {
            "mean_acceptance_length": [
                vars(mean_acceptance_length(case)) for case in measured.cases
            ]
        }
        for name, (trained, measured) in done.items()
    }
    write_text(folder / "ablations.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "ablations.md", table)
    return table


def make_table(done: dict[str, tuple[Trained, Measured]], baseline: str) -> str:
    """A Markdown table; differences are paired, against the baseline at the same temperature and
    its first draft length that is the same, else the one it was trained with."""
    lines = [
        "| variant | k | T | M | steps | mean acceptance length | difference "
        "| accepted at 1 2 3 4 5 | draft ms | verify ms | plain ms | speed-up |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, (trained, measured) in done.items():
        for case in measured.cases:
            against = compared_with(done.get(baseline), case)
            lines.append(table_row(name, trained, case, against))
    return "\n".join(lines) + "\n"


def compared_with(baseline: tuple[Trained, Measured] | None, case: Case) -> Case | None:
    """The baseline's case at the same k, else at the k it was trained with; None: there is none."""
    if baseline is None:
        return None
    trained, measured = baseline
    cases = [c for c in measured.cases if c.temperature == case.temperature]
    cases = [c for c in cases if len(c.tokens) == len(case.tokens)]
    own = trained.settings["drafter"]["k"]
    order = sorted(cases, key=lambda c: (c.k != case.k, c.k != own))
    return order[0] if order else None


def table_row(name: str, trained: Trained, case: Case, against: Case | None) -> str:
    rate = mean_acceptance_length(case)
    difference = "" if against in (None, case) else signed(rate_difference(case, against))
    accepted = " ".join(f"{share:.2f}".lstrip("0") for share in case.conditional[:5])
    speed = f"{case.speedup:.2f}× ({case.speedup_low:.2f}–{case.speedup_high:.2f})"
    cells = [
        name,
        str(case.k),
        f"{case.temperature:g}",
        f"{trained.parameters / 1e6:.2f}",
        str(trained.steps),
        f"{rate.value:.3f} ({rate.low:.3f}–{rate.high:.3f})",
        difference,
        accepted,
        f"{case.draft_ms:.2f}",
        f"{case.verify_ms:.2f}",
        f"{case.plain_ms:.2f}",
        speed,
    ]
    return "| " + " | ".join(cells) + " |"


def signed(found: Estimate) -> str:
    """With a true minus, starred where the interval leaves 0 out."""
    star = "" if found.low <= 0.0 <= found.high else " *"
    text = f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f}){star}"
    return text.replace("-", "−")


def mean_acceptance_length(case: Case) -> Estimate:
    ratio = Ratio(np.array(case.tokens, float), np.array(case.rounds, float))
    found = estimate_ratio(ratio, draw_resamples(len(case.tokens), RESAMPLES))
    assert found is not None
    return found


def rate_difference(case: Case, against: Case) -> Estimate:
    """Tokens a round of one less those of the other, over resamples of the same sentences."""

    def rates(one: Case, counts: Array) -> Array:
        return (counts @ np.array(one.tokens, float)) / (counts @ np.array(one.rounds, float))

    resamples = draw_resamples(len(case.tokens), RESAMPLES)
    whole = np.ones((1, len(case.tokens)))
    value = float((rates(case, whole) - rates(against, whole))[0])
    return with_interval(value, rates(case, resamples) - rates(against, resamples))
