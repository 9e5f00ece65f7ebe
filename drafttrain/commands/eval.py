"""Measure a drafter on a target and inputs, and leave report.json, samples and a plot.

The way of `drafttrain eval`: settings -> `plan` (what to measure, checked) -> `load_pair` and
`build_method` (models and methods) -> `evaluate` (decode, count, report) -> files and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drafttrain.build.method import Method, build_method
from drafttrain.build.pairs import Pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.sweep import expand_sweep
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import compile_calls
from drafttrain.evaluation.batches.tables import batch_table, lengths_table
from drafttrain.evaluation.evaluate import Evaluation, evaluate, write_evaluation
from drafttrain.evaluation.forced.evaluate import evaluate_teacher_forced
from drafttrain.evaluation.forced.tables import drafter_table, position_table
from drafttrain.evaluation.options import read_options
from drafttrain.evaluation.plan import Plan, make_plan, plan_lines
from drafttrain.evaluation.report import TreeAxis
from drafttrain.evaluation.served.tables import served_table, synthetic_lines
from drafttrain.evaluation.table_style import print_findings
from drafttrain.evaluation.tables import main_table, parity_lines, speech_table, trade_off_table
from drafttrain.evaluation.trees.rank_acceptance import measure_ranks, with_ranks
from drafttrain.evaluation.trees.tables import tree_table


def measure(settings: EvalConfig, dry_run: bool = False) -> None:
    """Run the evaluation that the settings describe, write its files, print its tables.

    dry_run: only say what would be measured, once all has been checked but the weights.

    Raises ValueError, before any model loads, for settings that do not go together.
    """
    measure_methods(settings, expand_sweep(settings.decode, settings.sweep), dry_run=dry_run)


def measure_methods(
    settings: EvalConfig,
    variants: Sequence[DecodeConfig],
    compared_by: TreeAxis | None = None,
    dry_run: bool = False,
) -> None:
    """The same with these methods of the drafter in place of those swept.

    compared_by: the size that trees have in common, where the methods are trees to compare.
    """
    plan = make_plan(settings, variants)
    if dry_run:
        plan.check_pair()
        print("\n".join(plan_lines(plan)))
        return
    pair = plan.load_pair()
    options = read_options(settings, compared_by)
    model, data_name = CachedModel(pair.target.model), str(settings.data.path)
    methods = build_methods(plan, pair)
    given = pair.target, model, methods, plan.rows, options, data_name
    compile_calls(settings.compile)
    if settings.mode == "decode":
        evaluation = evaluate(*given, progress=True)
    else:
        report = evaluate_teacher_forced(
            *given, settings.p_min, progress=True, served=settings.served
        )
        evaluation = Evaluation(report, [])
    write_evaluation(evaluation, settings.report)
    report = evaluation.report
    if report.mode == "teacher-forced":
        tables = [drafter_table(report), position_table(report)]
    else:
        tables = [main_table(report), speech_table(report)]
        tables += [trade_off_table(report), tree_table(report)]
    tables += [batch_table(report), lengths_table(report), served_table(report)]
    files = [*synthetic_lines(report), f"report: {settings.report}"]
    print_findings(tables, parity_lines(report), files)


def build_methods(plan: Plan, pair: Pair) -> list[Method]:
    """The methods of the plan; acceptance by rank is measured first where a tree needs it."""
    variants = plan.variants
    if plan.rank_rows is not None and plan.settings.rank_data is not None:
        sampling, name = plan.settings.decode.sampling, str(plan.settings.rank_data.path)
        by_rank = measure_ranks(pair, sampling, plan.rank_rows, name)
        variants = with_ranks(variants, by_rank)
    methods = [build_method(variant, pair) for variant in variants]
    for other in plan.others:
        same = other.config.drafter == plan.settings.decode.drafter
        led = pair if same else pair.led_by(str(other.config.drafter))
        method = build_method(other.config, led)
        methods.append(replace(method, label=other.label, other=other.name))
    return methods
