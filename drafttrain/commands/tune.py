"""Choose how to draft: measure costs, replay chains, play trees and cascades, write files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from drafttrain.build.method import build_sampling
from drafttrain.config.commands import TuneConfig
from drafttrain.config.runs import head_folders
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.options import TIMING_REPEATS
from drafttrain.evaluation.played.player import Player
from drafttrain.evaluation.prompts import Prompt, both_in_words
from drafttrain.evaluation.report import plot_path, target_facts, write_json, write_text
from drafttrain.evaluation.stops.calibration import (
    calibration_metrics,
    record_positions,
    reliability,
)
from drafttrain.evaluation.stops.choice import (
    all_candidates,
    check_predictions,
    choose,
    count_on,
    replayed,
)
from drafttrain.evaluation.stops.measuring import timed_lengths
from drafttrain.evaluation.stops.page import tune_page
from drafttrain.evaluation.stops.plots import plot_tune
from drafttrain.evaluation.stops.policy_file import default_policy_file, write_policy_file
from drafttrain.evaluation.stops.prices import Prices
from drafttrain.evaluation.stops.report import HeadFacts, TuneReport
from drafttrain.evaluation.stops.tables import cost_lines, head_table, policy_table, verdict_lines
from drafttrain.evaluation.stops.workbench import (
    Workbench,
    check_tuning,
    open_bench,
    played_of,
    within_block,
)
from drafttrain.evaluation.table_style import print_findings

CALIBRATION_PROMPTS = 100
"""Most prompts that are decoded to judge heads on positions of real drafts."""


def tune(settings: TuneConfig, dry_run: bool = False) -> None:
    """Run the tuning that the settings describe, write its files, print its tables.

    dry_run: only print what would be done.

    Raises ValueError, before any model loads, for settings that do not go together.
    """
    settings = within_block(settings)
    if dry_run:
        print(plan_tuning(settings))
        return
    check_tuning(settings)
    bench = open_bench(settings)
    for line in bench.left_out:
        print(line)
    player = Player(bench.target, bench.pair, bench.sampling)
    choice = choose(bench, player)
    reported_on = None
    if bench.reporting is not None:
        counts = count_on(bench, player, choice, bench.reporting, "report")
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
        rungs=choice.searched.rungs,
        dropped=choice.searched.dropped,
        checked=checked,
        best=choice.best.name,
        best_chain=choice.chain.name,
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


def plan_tuning(settings: TuneConfig) -> str:
    """What a tuning would do, without loading any weights or writing anything."""
    check_tuning(settings)
    folders = [] if settings.heads is None else head_folders(Path(str(settings.heads)))
    names = [folder.name for folder in folders]
    greedy = settings.sampling is None or settings.sampling.temperature == 0
    rules = ("rejection",) if greedy else settings.verifiers
    candidates = all_candidates(settings, names, 0.1, rules)
    played = played_of(settings, settings.max_draft)
    timed = ", ".join(f"k={k}" for k in timed_lengths(settings.lengths))
    return "\n".join(
        [
            f"heads     {len(names)}{': ' if names else ''}{', '.join(names)}",
            f"policies  {len(candidates)}, replayed",
            f"played    {len(played)} trees and cascades, "
            f"on {settings.first_prompts} prompts first",
            f"prompts   {both_in_words(settings)}",
            f"timing    {settings.timing_prompts} prompts {TIMING_REPEATS} times: plain, {timed}",
            f"report    {settings.report}",
        ]
    )
