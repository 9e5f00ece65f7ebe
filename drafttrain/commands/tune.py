"""Choose a stop policy: measure costs, trace prompts, replay every policy, report, write a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from drafttrain.build.method import build_sampling
from drafttrain.build.policy import POLICY, dump_policy
from drafttrain.commands.eval import LOG_WIDTH
from drafttrain.config.commands import TuneConfig
from drafttrain.config.inputs import DataConfig
from drafttrain.config.policy import Policy
from drafttrain.config.runs import head_folders
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import Entropy, HeadPolicy
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.report import (
    DataFacts,
    SkippedRow,
    TargetFacts,
    plot_path,
    write_text,
)
from drafttrain.evaluation.runner import (
    Decoded,
    EvaluationOptions,
    Prompt,
    Skipped,
    decode_interleaved,
    read_prompts,
)
from drafttrain.evaluation.stops.calibration import (
    OnPolicy,
    calibration_metrics,
    record_positions,
    reliability,
)
from drafttrain.evaluation.stops.choice import Prices, best_of, candidates_of, policy_results
from drafttrain.evaluation.stops.costs import (
    Costs,
    decision_seconds,
    fit_costs,
    median_seconds,
    threshold_from_costs,
)
from drafttrain.evaluation.stops.plots import plot_tune
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts
from drafttrain.evaluation.stops.replay_prompts import Replaying, replay_prompts
from drafttrain.evaluation.stops.report import (
    CostFacts,
    HeadFacts,
    Replayed,
    TuneReport,
    write_tune_report,
)
from drafttrain.evaluation.stops.tables import cost_lines, head_table, policy_table, verdict_lines
from drafttrain.evaluation.stops.trace_log import TraceOptions
from drafttrain.evaluation.stops.workbench import (
    TIMING_REPEATS,
    Workbench,
    check_tuning,
    open_bench,
    plan_tuning,
    timed_lengths,
    warping,
)
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import ROW_FEATURES, drawn_states

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
    rows = load_inputs(settings.data)
    report_rows = (
        None if settings.report_data is None else load_inputs(settings.report_data, "report_data")
    )
    bench = open_bench(settings, rows)
    reporting: tuple[list[Prompt], list[Skipped]] | None = None
    if report_rows is not None:
        reporting = read_prompts(bench.pair.target, bench.target, report_rows)
    choice = choose(bench)
    counts = None
    if reporting is not None:
        counts = replay_prompts(choice.replaying, reporting[0], "report", progress=True)
    judging = (reporting[0] if reporting else bench.prompts)[:CALIBRATION_PROMPTS]
    report = TuneReport(
        target=target_facts(bench),
        drafter=str(settings.drafter),
        heads=str(settings.heads),
        sampling=warping(bench.sampling),
        max_new_tokens=bench.sampling.max_new_tokens,
        max_draft=settings.max_draft,
        costs=choice.costs,
        head_facts=judge_heads(bench, judging, choice.prices),
        calibration_prompts=len(judging),
        calibration_length=max(settings.lengths),
        best=choice.best.name,
        best_fixed=choice.fixed.name,
        best_head=choice.head.name,
        chosen_on=replayed(choice, settings, settings.data, bench.prompts, bench.skipped),
        reported_on=None
        if reporting is None
        else replayed(choice, settings, settings.report_data, *reporting, counts),
        environment=describe_environment(),
    )
    write_tune_report(report, settings.report)
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
    counts = replay_prompts(replaying, bench.prompts, "choose", progress=True)
    best, fixed, head = (
        best_of(counts, candidates, prices, kinds)
        for kinds in (("fixed", "entropy", "head"), ("fixed",), ("head",))
    )
    return Choice(replaying, prices, costs, counts, best, fixed, head)


def replayed(
    choice: Choice,
    settings: TuneConfig,
    data: DataConfig | None,
    prompts: Sequence[Prompt],
    skipped: Sequence[Skipped],
    counts: PolicyCounts | None = None,
) -> Replayed:
    """The metrics of all policies; of the choosing prompts unless other counts are given."""
    assert data is not None
    counts = choice.counts if counts is None else counts
    candidates, tosses = choice.replaying.candidates, choice.replaying.options.tosses
    return Replayed(
        data=DataFacts(
            path=data.path,
            prompts=len(prompts),
            references=sum(prompt.reference is not None for prompt in prompts),
            skipped=[SkippedRow(row=one.row, reason=one.reason) for one in skipped],
        ),
        tokens=int(counts.tokens[:, 0].sum()) // tosses,
        replicates=tosses,
        policies=policy_results(
            counts, candidates, choice.prices, choice.fixed, settings.bootstrap
        ),
    )


def target_facts(bench: Workbench) -> TargetFacts:
    model = bench.pair.target.model
    return TargetFacts(
        path=bench.pair.target.path,
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
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


def measure_costs(bench: Workbench) -> tuple[Prices, CostFacts]:
    """t_draft and t_target of this machine: some prompts decoded at some lengths, interleaved."""
    lengths = timed_lengths(bench.settings.lengths)
    prompts = bench.prompts[: bench.settings.timing_prompts]
    options = EvaluationOptions(
        sampling=build_sampling(bench.sampling),
        max_new_tokens=bench.sampling.max_new_tokens,
        seed=bench.sampling.seed,
        baselines=(),
        repeats=TIMING_REPEATS,
        warmup=1,
    )
    methods = [bench.method(k) for k in lengths]
    plain, *drafted = decode_interleaved(
        bench.pair.target, bench.target, methods, prompts, options, progress=True
    )
    outputs = [output for decoded in drafted for output in decoded.outputs]
    costs = fit_costs(outputs, bench.block)
    heads = {name: head_seconds(bench, head) for name, head in bench.heads.items()}
    entropy = decision_seconds(Entropy(1e9, 100), *example(bench))
    seconds, tokens = plain.median_seconds.sum(), sum(len(o.tokens) for o in plain.outputs)
    prices = Prices(costs, float(tokens / seconds), heads, entropy)
    return prices, cost_facts(costs, prices, plain, lengths, len(prompts))


def cost_facts(
    costs: Costs, prices: Prices, plain: Decoded, lengths: list[int], prompts: int
) -> CostFacts:
    rounds = [round for output in plain.outputs for round in output.rounds]
    return CostFacts(
        t_draft=costs.t_draft,
        t_target=costs.t_target,
        constant=costs.constant,
        t_slot=costs.t_slot,
        r_squared=costs.r_squared,
        runs=costs.runs,
        draft_mean=costs.draft_mean,
        target_mean=costs.target_mean,
        plain_target=sum(round.target_seconds for round in rounds) / len(rounds),
        plain_tokens_per_second=prices.plain_tokens_per_second,
        lengths=lengths,
        prompts=prompts,
        entropy_seconds=prices.entropy,
        suggested_h=threshold_from_costs(costs.t_draft, costs.t_target)
        if costs.t_target > costs.t_draft
        else None,
    )


def head_seconds(bench: Workbench, head: AcceptanceHead) -> float:
    """What a head takes to judge a token, or all slots of a block, as the policy asks it; where
    states are made for heads alone, with the time to make one."""
    hidden, logits = example(bench)
    slots = bench.settings.max_draft if bench.block else 1
    policy = HeadPolicy(head, 1.0 - 1e-9, 100)
    judging = decision_seconds(policy, hidden.expand(slots, -1), logits)
    if bench.state_kind != "drawn":
        return judging
    rows, token = logits[None].float(), torch.zeros(1, dtype=torch.long)
    return judging + median_seconds(lambda: drawn_states(hidden[:, :-ROW_FEATURES], rows, token))


def example(bench: Workbench) -> tuple[torch.Tensor, torch.Tensor]:
    """A hidden state and a row of logits of the drafter's sizes, for timing. [1, D], [V]."""
    model = bench.pair.drafter_model
    assert model is not None
    width = next(iter(bench.heads.values())).config.hidden_size
    vocabulary = bench.pair.target.model.config.get_text_config(decoder=True).vocab_size
    like = {"dtype": model.dtype, "device": model.device}
    return torch.zeros(1, width, **like), torch.zeros(vocabulary, **like)


def judge_heads(bench: Workbench, prompts: Sequence[Prompt], prices: Prices) -> list[HeadFacts]:
    """Calibration of every head on the positions of drafts that decoding really made."""
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
    return [head_facts(bench, name, positions, len(prompts), prices) for name in bench.heads]


def head_facts(
    bench: Workbench, name: str, positions: OnPolicy, prompts: int, prices: Prices
) -> HeadFacts:
    head = bench.heads[name]
    with torch.inference_mode():
        states = positions.hidden.to(head.device)
        predicted = head.acceptance(states).double().cpu().numpy()
    resamples = draw_resamples(prompts, bench.settings.bootstrap)
    labels, prompt, before = positions.acceptance, positions.prompt, ~positions.rejected_before
    return HeadFacts(
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
    console = Console()
    if not console.is_terminal:  # a log file has room for whole columns
        console = Console(width=LOG_WIDTH)
    console.print(policy_table(report))
    console.print(head_table(report))
    for line in [*cost_lines(report), *verdict_lines(report)]:
        console.print(line, highlight=False, markup=False)
    for line in (f"report: {path}", f"policy: {policy_file}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
