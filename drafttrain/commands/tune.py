"""Choose a stop policy: measure costs, trace prompts, replay every policy, report, write a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drafttrain.build.method import build_sampling
from drafttrain.build.policy import POLICY, dump_policy
from drafttrain.config.commands import TuneConfig
from drafttrain.config.policy import Policy
from drafttrain.config.runs import head_folders
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.options import TIMING_REPEATS
from drafttrain.evaluation.prompts import PromptSet
from drafttrain.evaluation.report import (
    data_facts,
    plot_path,
    target_facts,
    write_json,
    write_text,
)
from drafttrain.evaluation.stops.chain_trace import TraceOptions
from drafttrain.evaluation.stops.judged_heads import judge_heads
from drafttrain.evaluation.stops.plots import plot_tune
from drafttrain.evaluation.stops.policy_results import best_of, candidates_of, policy_results
from drafttrain.evaluation.stops.prices import Prices, measure_costs, timed_lengths
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts
from drafttrain.evaluation.stops.report import CostFacts, Replayed, TuneReport
from drafttrain.evaluation.stops.tables import cost_lines, head_table, policy_table, verdict_lines
from drafttrain.evaluation.stops.trace_and_replay import Replaying, replay_prompts
from drafttrain.evaluation.stops.workbench import Workbench, check_tuning, open_bench
from drafttrain.evaluation.table_style import print_findings

CALIBRATION_PROMPTS = 100
"""Most prompts that are decoded to judge heads on positions of real drafts."""


def tune(settings: TuneConfig, dry_run: bool = False) -> None:
    """Run the tuning that the settings describe, write its files, print its tables.

    dry_run: only print what would be done.

    Raises ValueError, before any model loads, for settings that do not go together.
    """
    assert settings.data is not None and settings.report is not None
    if dry_run:
        print(plan_tuning(settings))
        return
    check_tuning(settings)
    bench = open_bench(settings)
    choice = choose(bench)
    counts = None
    if bench.reporting is not None:
        prompts = bench.reporting.prompts
        counts = replay_prompts(choice.replaying, prompts, "report", progress=True)
    judging = (bench.reporting or bench.choosing).prompts[:CALIBRATION_PROMPTS]
    report = TuneReport(
        target=target_facts(bench.pair.target),
        drafter=str(settings.drafter),
        heads=str(settings.heads),
        sampling=asdict(build_sampling(bench.sampling)),
        max_new_tokens=bench.sampling.max_new_tokens,
        max_draft=settings.max_draft,
        costs=choice.costs,
        head_facts=judge_heads(bench, judging, choice.prices),
        calibration_prompts=len(judging),
        calibration_length=max(settings.lengths),
        best=choice.best.name,
        best_fixed=choice.fixed.name,
        best_head=choice.head.name,
        chosen_on=replayed(choice, choice.counts, bench.choosing, settings.bootstrap),
        reported_on=None
        if bench.reporting is None or counts is None
        else replayed(choice, counts, bench.reporting, settings.bootstrap),
        environment=describe_environment(),
    )
    write_json(report, settings.report)
    plot_tune(report, plot_path(settings.report))
    beside_heads = head_folders(Path(str(settings.heads)))[0].parent / POLICY
    policy_file = settings.policy or beside_heads
    write_policy_file(report, choice, policy_file)
    print_tuning(report, settings.report, policy_file)


@dataclass(frozen=True)
class Choice:
    """The policies chosen, on the prompts to choose on."""

    replaying: Replaying
    prices: Prices
    costs: CostFacts
    counts: PolicyCounts
    best: Candidate
    fixed: Candidate
    head: Candidate


def choose(bench: Workbench) -> Choice:
    """Measure costs, replay every policy, and take the one of most modelled tokens a second."""
    settings = bench.settings
    prices, costs = measure_costs(bench)
    candidates = candidates_of(
        settings.lengths, settings.entropy, list(bench.heads), settings.h, settings.max_draft
    )
    replaying = make_replaying(bench, candidates)
    counts = replay_prompts(replaying, bench.choosing.prompts, "choose", progress=True)
    best, fixed, head = (
        best_of(counts, candidates, prices, kinds)
        for kinds in (("fixed", "entropy", "head"), ("fixed",), ("head",))
    )
    return Choice(replaying, prices, costs, counts, best, fixed, head)


def replayed(choice: Choice, counts: PolicyCounts, prompts: PromptSet, bootstrap: int) -> Replayed:
    """The metrics of all policies on the prompts that were counted."""
    candidates, tosses = choice.replaying.candidates, choice.replaying.options.tosses
    return Replayed(
        data=data_facts(prompts),
        tokens=int(counts.tokens[:, 0].sum()) // tosses,
        replicates=tosses,
        policies=policy_results(counts, candidates, choice.prices, choice.fixed, bootstrap),
    )


def make_replaying(bench: Workbench, candidates: Sequence[Candidate]) -> Replaying:
    settings = bench.settings
    options = TraceOptions(
        sampling=build_sampling(bench.sampling),
        max_new_tokens=bench.sampling.max_new_tokens,
        depth=max(settings.max_draft, *settings.lengths),
        replicates=settings.replicates,
        state_kind=bench.state_kind,
    )
    return Replaying(
        target=bench.target,
        drafter=bench.pair.drafter,
        heads=bench.heads,
        candidates=candidates,
        options=options,
        max_draft=settings.max_draft,
        seed=bench.sampling.seed,
    )


def write_policy_file(report: TuneReport, choice: Choice, file: Path) -> None:
    """policy.json: the best policy, the best head and its h, and what the choice rests on."""
    best, head = choice.best, choice.head
    policy = Policy(
        stop=best.kind,
        k=int(best.value) if best.kind == "fixed" else None,
        max_draft=report.max_draft,
        head=head.head,
        h=head.value,
        entropy=best.value if best.kind == "entropy" else None,
        sampling=report.sampling,
    )
    gain = report.reported.find(best.name).metrics["gain"]
    facts = {
        "gain_over_best_fixed": {
            "best_fixed": report.best_fixed,
            "value": gain.value,
            "low": gain.low,
            "high": gain.high,
            "data": report.reported.data.path,
            "chosen_on_the_same_data": report.reported_on is None,
        },
        "costs": report.costs.model_dump(include={"t_draft", "t_target", "r_squared"}),
        "machine": report.environment.gpu or report.environment.cpu,
        "target": report.target.path,
        "drafter": report.drafter,
    }
    content = dump_policy(policy) | facts
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def print_tuning(report: TuneReport, path: Path, policy_file: Path) -> None:
    """The tables, the verdict, and where the files lie."""
    print_findings(
        [policy_table(report), head_table(report)],
        [*cost_lines(report), *verdict_lines(report)],
        [f"report: {path}", f"policy: {policy_file}"],
    )


def plan_tuning(settings: TuneConfig) -> str:
    """What a tuning would do, without loading any weights or writing anything."""
    assert settings.data is not None and settings.report is not None
    check_tuning(settings)
    names = [folder.name for folder in head_folders(Path(str(settings.heads)))]
    candidates = candidates_of(
        settings.lengths, settings.entropy, names, settings.h, settings.max_draft
    )
    prompts = [f"{len(load_inputs(settings.data))} of {settings.data.path} to choose"]
    if settings.report_data is not None:
        prompts.append(
            f"{len(load_inputs(settings.report_data, 'report_data'))} of "
            f"{settings.report_data.path} to report"
        )
    timed = ", ".join(f"k={k}" for k in timed_lengths(settings.lengths))
    return "\n".join(
        [
            f"heads     {len(names)}: {', '.join(names)}",
            f"policies  {len(candidates)}, replayed",
            f"prompts   {'; '.join(prompts)}",
            f"timing    {settings.timing_prompts} prompts {TIMING_REPEATS} times: plain, {timed}",
            f"report    {settings.report}",
        ]
    )
