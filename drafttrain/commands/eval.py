"""Measure a drafter on a target and inputs, and leave report.json, samples and a plot.

The way of `drafttrain eval`: settings -> `plan` (what to measure, checked) -> `load_pair` and
`build_method` (models and methods) -> `evaluate` (decode, count, report) -> files and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

from torch import Tensor

from drafttrain.build.method import Method, build_method
from drafttrain.build.pairs import Pair
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.kinds import kind_of
from drafttrain.config.progress import tracked
from drafttrain.config.sweep import expand_sweep
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import compile_calls
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Source
from drafttrain.evaluation.batches.tables import batch_table, lengths_table
from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.evaluate import (
    Evaluation,
    evaluate,
    evaluate_teacher_forced,
    write_evaluation,
)
from drafttrain.evaluation.options import EvaluationOptions, read_options
from drafttrain.evaluation.plan import Plan, make_plan, plan_lines
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.report import Report, ServedRun, TreeAxis
from drafttrain.evaluation.served.measure import judge_along, served_runs
from drafttrain.evaluation.served.tables import served_table, synthetic_lines
from drafttrain.evaluation.stops.chain_trace import TraceOptions
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
    if settings.mode == "decode":
        model, data_name = CachedModel(pair.target.model), str(settings.data.path)
        methods = build_methods(plan, pair)
        compile_calls(settings.compile)
        evaluation = evaluate(
            pair.target, model, methods, plan.rows, options, data_name, progress=True
        )
    else:
        evaluation = Evaluation(measure_teacher_forced(plan, pair, options), [])
    write_evaluation(evaluation, settings.report)
    report = evaluation.report
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
    for name, other in plan.others.items():
        same = other.drafter == plan.settings.decode.drafter
        led = pair if same else pair.led_by(str(other.drafter))
        methods.append(replace(build_method(other, led), label=name))
    return methods


def measure_teacher_forced(plan: Plan, pair: Pair, options: EvaluationOptions) -> Report:
    """Acceptance at each k, from one drafter pass along each of the target's own outputs.

    By strict matching where they are greedy; of a language model also by the rules of engines.
    """
    cached = CachedModel(pair.target.model)
    prompts, _ = read_prompts(pair.target, cached, plan.rows)
    sources = [cached.read(prompt.source, pair.drafter.requires) for prompt in prompts]
    outputs = Decoder(
        cached,
        NoDrafter(),
        FixedLength(1),
        build_verifier(AUTO, options.sampling),
        options.sampling,
        lambda place: sequence_randomness(options.seed, prompts[place].row, cached.device),
    ).decode_all(sources, options.max_new_tokens)
    pairs = [(source, output.tokens) for source, output in zip(sources, outputs, strict=True)]
    lengths = [variant.stop.k for variant in plan.variants]
    drafters = []
    if options.sampling.greedy:
        drafters = [(pair.drafter.name, k, partial(first_tokens, pair, k)) for k in lengths]
    data_name = str(plan.settings.data.path)
    report = evaluate_teacher_forced(pair.target, drafters, pairs, options, data_name)
    if pair.language_model is None:
        return report
    return report.model_copy(update={"served": served(plan, pair, cached, pairs, options)})


def served(
    plan: Plan,
    pair: Pair,
    target: CachedModel,
    pairs: Sequence[tuple[Source, Sequence[int]]],
    options: EvaluationOptions,
) -> list[ServedRun]:
    """What engines would accept of a language model's drafts along the outputs."""
    lengths = [variant.stop.k for variant in plan.variants]
    tracing = TraceOptions(options.sampling, options.max_new_tokens, max(lengths))
    along = [
        judge_along(target, pair.drafter.model, source, output, tracing)
        for source, output in tracked(pairs, "judge", "input")
    ]
    resamples = draw_resamples(len(along), options.bootstrap, options.seed)
    return served_runs(pair.drafter.name, along, lengths, plan.settings.p_min, resamples)


def first_tokens(pair: Pair, k: int, source: Source, target_ids: Tensor) -> Tensor:
    """Drafts of k tokens at every prefix. Shapes: [L] -> [L, k]."""
    along = resolve_name(kind_of(pair.drafter_model.config).blocks_along)
    return along(pair.drafter.model, source, target_ids, k)
