"""Choose a stop policy: measure costs, trace prompts, replay every policy, report, write a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from drafttrain.build.method import build_sampling
from drafttrain.build.policy import POLICY, dump_policy
from drafttrain.build.verifiers import AUTO
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import VerifierConfig
from drafttrain.config.policy import Policy
from drafttrain.config.runs import head_folders
from drafttrain.config.stops import STOPS
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.options import TIMING_REPEATS, timing_options
from drafttrain.evaluation.prompts import Prompt, PromptSet, both_in_words
from drafttrain.evaluation.report import data_facts, plot_path, target_facts, write_json, write_text
from drafttrain.evaluation.runner import make_jobs, run_interleaved
from drafttrain.evaluation.stops.calibration import (
    calibration_metrics,
    record_positions,
    reliability,
)
from drafttrain.evaluation.stops.costs import Prices, measure_costs, timed_lengths
from drafttrain.evaluation.stops.page import tune_page
from drafttrain.evaluation.stops.plots import plot_tune
from drafttrain.evaluation.stops.policy_results import (
    CHOSEN,
    batch_choice,
    best_of,
    candidates_of,
    policy_results,
    ranked,
    throughput,
)
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts, VerifierOfChains
from drafttrain.evaluation.stops.report import (
    BatchChoice,
    CheckedPolicy,
    CostFacts,
    HeadFacts,
    Replayed,
    TuneReport,
)
from drafttrain.evaluation.stops.tables import cost_lines, head_table, policy_table, verdict_lines
from drafttrain.evaluation.stops.trace_and_replay import replay_prompts
from drafttrain.evaluation.stops.workbench import Workbench, check_tuning, open_bench
from drafttrain.evaluation.table_style import print_findings

CALIBRATION_PROMPTS = 100
"""Most prompts that are decoded to judge heads on positions of real drafts."""


def tune(settings: TuneConfig, dry_run: bool = False) -> None:
    """Run the tuning that the settings describe, write its files, print its tables.

    dry_run: only print what would be done.

    Raises ValueError, before any model loads, for settings that do not go together.
    """
    if dry_run:
        print(plan_tuning(settings))
        return
    check_tuning(settings)
    bench = open_bench(settings)
    for name in bench.left_out:
        print(f"{name} verification cannot be replayed for this pair, and is left out")
    choice = choose(bench)
    reported_on = None
    if bench.reporting is not None:
        prompts = bench.reporting.prompts
        counts = replay_prompts(bench, choice.candidates, prompts, "report")
        reported_on = replayed(bench, choice, counts, bench.reporting)
    checked = check_predictions(bench, choice)
    judging = (bench.reporting or bench.choosing).prompts[:CALIBRATION_PROMPTS]
    judging = judging if bench.heads else []
    report = TuneReport(
        target=target_facts(bench.pair.target),
        drafter=str(settings.drafter),
        heads=None if settings.heads is None else str(settings.heads),
        sampling=asdict(build_sampling(bench.sampling)),
        max_new_tokens=bench.sampling.max_new_tokens,
        max_draft=settings.max_draft,
        costs=choice.costs,
        head_facts=judge_heads(bench, judging, choice.prices),
        calibration_prompts=len(judging),
        calibration_length=max(settings.lengths),
        batches=choice.batches,
        checked=checked,
        best=choice.best.name,
        best_fixed=choice.fixed.name,
        best_head=None if choice.head is None else choice.head.name,
        chosen_on=replayed(bench, choice, choice.counts, bench.choosing),
        reported_on=reported_on,
        environment=describe_environment(),
    )
    write_json(report, settings.report)
    plot_tune(report, plot_path(settings.report))
    page = settings.report.with_suffix(".html")
    write_text(page, tune_page(report))
    policy_file = settings.policy or default_policy_file(settings)
    write_policy_file(report, choice, policy_file)
    print_findings(
        [policy_table(report), *([head_table(report)] if bench.heads else [])],
        [*cost_lines(report), *verdict_lines(report)],
        [f"report: {settings.report}", f"page: {page}", f"policy: {policy_file}"],
    )


@dataclass(frozen=True)
class Choice:
    """The policies chosen, on the prompts to choose on."""

    candidates: Sequence[Candidate]
    prices: Prices
    costs: CostFacts
    counts: PolicyCounts
    best: Candidate
    fixed: Candidate
    head: Candidate | None
    batches: list[BatchChoice]


def choose(bench: Workbench) -> Choice:
    """Measure costs, replay every policy, and take the one of most predicted tokens a second, at
    every batch size."""
    settings = bench.settings
    prices, costs = measure_costs(bench)
    draft_cost = costs.t_draft / costs.t_target
    candidates = all_candidates(settings, list(bench.heads), draft_cost, bench.verifiers)
    candidates = [one for one in candidates if bench.replays(one)]
    counts = replay_prompts(bench, candidates, bench.choosing.prompts, "choose")
    best, fixed = (best_of(counts, candidates, prices, kinds) for kinds in (CHOSEN, ("fixed",)))
    head = best_of(counts, candidates, prices, ("head",)) if bench.heads else None
    batches = [
        batch_choice(counts, candidates, prices, size, settings.bootstrap)
        for size in bench.batch_sizes
    ]
    return Choice(candidates, prices, costs, counts, best, fixed, head, batches)


def check_predictions(bench: Workbench, choice: Choice) -> list[CheckedPolicy]:
    """The best few and the best fixed length, decoded for real at every batch size."""
    settings = bench.settings
    prompts = bench.choosing.prompts[: settings.timing_prompts]
    counts, candidates, found = choice.counts.first(len(prompts)), choice.candidates, []
    for size in bench.batch_sizes if settings.finalists else ():
        best = ranked(choice.counts, candidates, choice.prices, CHOSEN, size)
        fixed = best_of(choice.counts, candidates, choice.prices, ("fixed",), size)
        chosen = list(dict.fromkeys([*best[: settings.finalists], fixed]))
        options = timing_options(bench.sampling)
        methods = [bench.triple(one) for one in chosen]
        jobs = make_jobs(bench.pair.target, bench.target, methods, prompts, options)
        _, *runs = run_interleaved(jobs, len(prompts), options, bench.target.device, True, size)
        for one, run in zip(chosen, runs, strict=True):
            ratio = throughput(counts, candidates.index(one), one, choice.prices, size)
            tokens = sum(len(output.tokens) for output in run.outputs)
            checked = CheckedPolicy(
                name=one.name,
                batch_size=size,
                predicted=float(ratio.numerators.sum() / ratio.denominators.sum()),
                decoded=float(tokens / run.cost_seconds.sum()),
            )
            found.append(checked)
    return found


def all_candidates(
    settings: TuneConfig,
    heads: list[str],
    draft_cost: float,
    verifiers: Sequence[VerifierOfChains],
) -> list[Candidate]:
    """Every policy to replay. draft_cost: what a drafted token costs in target calls."""
    by_rows = {
        "entropy": settings.entropy,
        "cumulative": settings.cumulative,
        "logistic": settings.h,
        "bandit": (max(round(draft_cost, 3), 0.001),),
    }
    ways = (heads, settings.h, settings.max_draft, verifiers)
    return candidates_of(settings.lengths, by_rows, *ways)


def replayed(
    bench: Workbench, choice: Choice, counts: PolicyCounts, prompts: PromptSet
) -> Replayed:
    """The metrics of all policies on the prompts that were counted."""
    tosses = bench.trace_options().tosses
    return Replayed(
        data=data_facts(prompts),
        tokens=int(counts.tokens[:, 0].sum()) // tosses,
        replicates=tosses,
        policies=policy_results(
            counts, choice.candidates, choice.prices, choice.fixed, bench.settings.bootstrap
        ),
    )


def judge_heads(bench: Workbench, prompts: Sequence[Prompt], prices: Prices) -> list[HeadFacts]:
    """Calibration of every head on the positions of drafts that decoding really made."""
    if not bench.heads:
        return []
    method = bench.method(max(bench.settings.lengths), bench.state_kind)
    positions = record_positions(
        bench.target,
        bench.pair.drafter,
        method.stop,
        method.verifier,
        build_sampling(bench.sampling),
        [prompt.source for prompt in prompts],
        bench.sampling.max_new_tokens,
        partial(sequence_randomness, bench.sampling.seed + 1, device=bench.target.device),
    )
    resamples = draw_resamples(len(prompts), bench.settings.bootstrap)
    labels, prompt, before = positions.acceptance, positions.prompt, ~positions.rejected_before
    found = []
    for name, head in bench.heads.items():
        with torch.inference_mode():
            predicted = head.acceptance(positions.hidden.to(head.device)).double().cpu().numpy()
        facts = HeadFacts(
            name=name,
            depth=head.config.depth,
            rejection_weight=head.config.rejection_weight,
            parameters=head.num_parameters(),
            seconds=prices.heads[name],
            all_positions=calibration_metrics(labels, predicted, prompt, resamples),
            before_rejection=calibration_metrics(
                labels[before], predicted[before], prompt[before], resamples
            ),
            reliability=reliability(labels, predicted),
        )
        found.append(facts)
    return found


def write_policy_file(report: TuneReport, choice: Choice, file: Path) -> None:
    """policy.json: the best policy, the best head and its h, and what the choice rests on."""
    by_name = {candidate.name: candidate for candidate in choice.candidates}
    first, *larger = choice.batches
    policy = chosen_policy(report, choice, by_name[first.best])
    batches = {one.batch_size: chosen_policy(report, choice, by_name[one.best]) for one in larger}
    policy, best = policy.model_copy(update={"batches": batches}), choice.best
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


def chosen_policy(report: TuneReport, choice: Choice, best: Candidate) -> Policy:
    """A policy, and the best head with its h even where it does not stop by it."""
    head = choice.head if best.head is None else best
    value = int(best.value) if best.kind == "fixed" else best.value
    values = {} if head is None else {"head": head.head, "h": head.value}
    return Policy(
        stop=best.kind,
        max_draft=report.max_draft,
        sampling=report.sampling,
        verifier=AUTO if best.verifier == "rejection" else VerifierConfig(kind=best.verifier),
        **(values | {STOPS[best.kind].varied: value}),
    )


def default_policy_file(settings: TuneConfig) -> Path:
    """Beside the heads; without heads in the drafter's folder, or beside the report where that is
    none of this machine."""
    if settings.heads is not None:
        return head_folders(Path(str(settings.heads)))[0].parent / POLICY
    folder = Path(str(settings.drafter))
    return (folder if folder.is_dir() else settings.report.parent) / POLICY


def plan_tuning(settings: TuneConfig) -> str:
    """What a tuning would do, without loading any weights or writing anything."""
    check_tuning(settings)
    folders = [] if settings.heads is None else head_folders(Path(str(settings.heads)))
    names = [folder.name for folder in folders]
    greedy = settings.sampling is None or settings.sampling.temperature == 0
    rules = ("rejection",) if greedy else settings.verifiers
    candidates = all_candidates(settings, names, 0.1, rules)
    timed = ", ".join(f"k={k}" for k in timed_lengths(settings.lengths))
    return "\n".join(
        [
            f"heads     {len(names)}{': ' if names else ''}{', '.join(names)}",
            f"policies  {len(candidates)}, replayed",
            f"prompts   {both_in_words(settings)}",
            f"timing    {settings.timing_prompts} prompts {TIMING_REPEATS} times: plain, {timed}",
            f"report    {settings.report}",
        ]
    )
