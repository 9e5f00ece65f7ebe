"""Choose how to draft by decoding the user's prompts, and write the choice.

The way of `drafttrain tune`: settings -> `make_plan` (candidates and prompts, checked) ->
`search_all` (decodes them in rungs) -> `measure_finalists` (figures on other prompts) -> report,
page, policy.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from datasets import Dataset

from drafttrain.build.method import AUTO, Method, build_sampling, build_verifier
from drafttrain.build.pairs import Pair
from drafttrain.config.commands import TuneConfig
from drafttrain.config.kinds import kind_of
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.evaluation.calibration import (
    CallSeconds,
    OracleCounts,
    follow_oracle,
    stop_threshold,
)
from drafttrain.evaluation.evaluate import Evaluation, write_evaluation
from drafttrain.evaluation.page import print_findings
from drafttrain.evaluation.prompts import EvaluationOptions, Prompt, read_prompts
from drafttrain.evaluation.report import Search, data_facts
from drafttrain.evaluation.runner import decode_by, plain_method
from drafttrain.evaluation.tables import main_table, search_tables, verdict_lines
from drafttrain.evaluation.tune import (
    FINAL_SHARE,
    Bench,
    build_methods,
    choose,
    default_policy_file,
    finalists,
    measure_finalists,
    search_all,
    time_left,
    write_policy,
)
from drafttrain.evaluation.tune_plan import (
    Candidate,
    TunePlan,
    first,
    make_candidates,
    make_plan,
    most_drafted,
)

OF_ORACLE = 16
"""Prompts along whose greedy outputs the oracle is followed."""
TIMED, TIMED_LENGTH = 2, 4
"""Prompts that a draft token and a target call are timed on, and draft tokens of a round."""


def tune(settings: TuneConfig, dry_run: bool = False) -> None:
    """Run the tuning that the settings describe, write its files, print its table.

    dry_run: only print what would be decoded. Raises ValueError, before any model loads, for
    settings that do not go together.
    """
    began = perf_counter()
    plan = make_plan(settings)
    if dry_run:
        print("\n".join(plan.lines()))
        return
    found, candidates = decode_plan(plan, began)
    report, policy = found.report, settings.policy or default_policy_file(settings)
    write_evaluation(found, settings.report)
    write_policy(report, candidates, build_sampling(settings.sampling), policy)
    heads = search_tables(report)[: bool(report.search.heads)]
    files = [f"report: {settings.report}", f"page: {settings.report.with_suffix('.html')}"]
    lines = [*files, f"policy: {policy}"]
    print_findings([main_table(report), *heads], verdict_lines(report), lines)


def decode_plan(plan: TunePlan, began: float) -> tuple[Evaluation, list[Candidate]]:
    """Search among the candidates and measure the best ones; began: when the minutes started."""
    settings, pair = plan.settings, plan.load_pair()
    model = pair.model
    prompts, skipped = read_prompts(pair.target, model, plan.rows)
    options = options_of(settings, plan.batch_sizes)
    seconds = time_calls(model, pair, prompts[:TIMED], options)
    grows = plan.drafting.grows_trees and takes_trees(model, pair)
    drafting = replace(plan.drafting, grows_trees=grows)
    threshold = stop_threshold(seconds, drafting.kind) if plan.heads else None
    candidates = make_candidates(settings, drafting, plan.heads, threshold)
    methods = build_methods(candidates, pair)
    bench = Bench(pair.target, model, candidates, methods, prompts, options)
    left = time_left(60.0 * settings.minutes - (perf_counter() - began))
    rungs = search_all(bench, lambda: left() - FINAL_SHARE * 60.0 * settings.minutes)
    choices = choose(rungs, candidates)
    names = finalists(rungs, choices)
    found = measure_finalists(bench, names, plan.reported, rungs, left, plan.reported_path)
    search = Search(
        drafter=str(settings.drafter),
        candidates={one.name: one.settings() for one in candidates},
        data=data_facts(str(settings.data.path), prompts, skipped),
        minutes=(perf_counter() - began) / 60.0,
        rungs=rungs,
        choices=choices,
        t_draft=seconds.t_draft,
        t_target=seconds.t_target,
        threshold=threshold,
        heads=plan.judged,
        oracle=oracle_of(bench, pair, plan.reported, most_drafted(settings, drafting)),
    )
    report = found.report.model_copy(update={"search": search})
    return replace(found, report=report), candidates


def takes_trees(model: CachedModel, pair: Pair) -> bool:
    """Whether both models can be given draft trees."""
    assistant = pair.drafter_model
    alone = assistant is None or not kind_of(assistant.config).is_language_model
    return model.takes_branches and (alone or pair.drafter.model.takes_branches)


def options_of(settings: TuneConfig, batch_sizes: Sequence[int]) -> EvaluationOptions:
    """How all candidates decode."""
    sampling = settings.sampling
    return EvaluationOptions(
        build_sampling(sampling),
        sampling.max_new_tokens,
        sampling.seed,
        baselines=(),
        batch_sizes=batch_sizes,
        repeats=1,
        warmup=1,
    )


def time_calls(
    model: CachedModel, pair: Pair, prompts: Sequence[Prompt], options: EvaluationOptions
) -> CallSeconds:
    """What a draft token and a target call take, with fixed drafts on a few prompts; they are
    decoded twice, and the second time counts."""
    verifier = build_verifier(AUTO, options.sampling)
    method = Method(pair.drafter, FixedLength(TIMED_LENGTH), verifier)
    decode_by(model, method, prompts, options, 1)
    return CallSeconds.of(decode_by(model, method, prompts, options, 1))


def oracle_of(bench: Bench, pair: Pair, rows: Dataset, longest: int) -> OracleCounts | None:
    """The oracle along a few plain greedy outputs; None where tokens are sampled."""
    options = bench.options
    if not options.sampling.greedy:
        return None
    prompts, _ = read_prompts(bench.target, bench.model, first(rows, OF_ORACLE))
    outputs = decode_by(bench.model, plain_method(options.sampling), prompts, options, 1)
    return follow_oracle(bench.model, pair.drafter, prompts, outputs, longest)
