"""`drafttrain tune`: chooses a drafting method on the user's prompts and writes it as a policy.

Settings -> `make_plan` (checks candidates and prompts) -> `search_all` (decodes in rungs) ->
`measure_finalists` (measures the best on other prompts) -> report, page and policy.json.
"""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from drafttrain.build.method import AUTO, Method, build_verifier
from drafttrain.build.pairs import Pair, load_pair
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import kind_of
from drafttrain.decoding.engine.engine import compile_calls, reserve
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.evaluation.calibration import follow_oracle, stop_threshold
from drafttrain.evaluation.evaluate import Evaluation, write_evaluation
from drafttrain.evaluation.metrics import call_seconds
from drafttrain.evaluation.plan import check_batches
from drafttrain.evaluation.prompts import Prompt, read_prompts, usable_rows
from drafttrain.evaluation.report import DataFacts, Search
from drafttrain.evaluation.runner import decode_by
from drafttrain.evaluation.tables import main_table, print_findings, search_tables, verdict_lines
from drafttrain.evaluation.tune import (
    FINAL_SHARE,
    Bench,
    choose,
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
    policy_file,
)
from drafttrain.models.loading import report_generate_defaults

OF_ORACLE = 16
"""Number of prompts for which the oracle stop policy is computed on greedy outputs."""
TIMED, TIMED_LENGTH = 2, 4
"""Number of prompts for timing a draft token and a target call; draft tokens per round."""


def tune(settings: TuneConfig, dry_run: bool = False) -> None:
    """Runs the search, writes its files and prints its table; dry_run: only prints the plan.

    Raises ValueError, before any model loads, for settings that do not fit each other.
    """
    began = perf_counter()
    plan = make_plan(settings)
    if dry_run:
        print("\n".join(plan.lines()))
        return
    pair = load_pair(settings.target, *plan.drafters)
    report_generate_defaults(pair.target, settings.sampling.temperature)
    evaluation, candidates = tune_pair(plan, pair, began)
    report, policy = evaluation.report, policy_file(settings)
    write_evaluation(evaluation, settings.report)
    write_policy(report, candidates, settings.sampling, policy)
    heads = search_tables(report)[: bool(report.search.heads)]
    use = f"policy: {policy}"
    if not settings.write:
        use += f" (use it with --policy {policy}; --write makes it the drafter's default)"
    page = f"page: {settings.report.with_suffix('.html')}"
    files = [f"report: {settings.report}", page, use]
    print_findings([main_table(report), *heads], verdict_lines(report), files)


def tune_pair(plan: TunePlan, pair: Pair, began: float) -> tuple[Evaluation, list[Candidate]]:
    """Searches among the candidates and measures the best of them on other prompts.

    began: the `perf_counter` from which settings.minutes counts.
    """
    settings = plan.settings
    prompts, skipped = read_prompts(pair, plan.rows)
    reported, unreported, _ = usable_rows(pair, plan.reported)
    for usable in (prompts, reported):
        check_batches(settings.batch_sizes, len(usable))
    compile_calls(settings.compile)
    longest = max(len(prompt.source.prefix) for prompt in prompts)
    reserve(longest + settings.sampling.max_new_tokens)
    t_draft, t_target = time_calls(pair, settings.sampling, prompts[:TIMED])
    models, assistant = [pair.model], pair.drafter_model
    if assistant is not None and kind_of(assistant.config).is_language_model:
        models.append(pair.drafter.model)
    grows = plan.drafting.grows_trees and all(model.supports_tree_attention for model in models)
    drafting = replace(plan.drafting, grows_trees=grows)
    threshold = stop_threshold(t_draft, t_target) if plan.heads else None
    candidates = make_candidates(settings, drafting, plan.heads, threshold)
    bench = Bench(pair, candidates, prompts, settings)
    compile_calls(settings.compile)
    left = time_left(60.0 * settings.minutes - (perf_counter() - began))
    rungs = search_all(bench, lambda: left() - FINAL_SHARE * 60.0 * settings.minutes)
    choices = choose(rungs, candidates)
    evaluation = measure_finalists(bench, finalists(rungs, choices), reported, rungs, left)
    oracle_prompts, _ = read_prompts(pair, first(reported, OF_ORACLE))
    search = Search(
        drafter=str(settings.drafter),
        candidates={candidate.name: candidate.settings() for candidate in candidates},
        data=DataFacts.of(settings.data, plan.rows, prompts, skipped),
        minutes=(perf_counter() - began) / 60.0,
        rungs=rungs,
        choices=choices,
        t_draft=t_draft,
        t_target=t_target,
        threshold=threshold,
        heads=plan.judged,
        oracle=follow_oracle(pair, settings.sampling, oracle_prompts, drafting.most),
    )
    data = evaluation.report.data.model_copy(update={"skipped": unreported})
    report = evaluation.report.model_copy(update={"search": search, "data": data})
    return replace(evaluation, report=report), candidates


def time_calls(
    pair: Pair, sampling: SamplingConfig, prompts: Sequence[Prompt]
) -> tuple[float, float]:
    """Returns the seconds per draft token and per target call at a fixed draft length, from the
    second of two passes over the prompts."""
    verifier = build_verifier(AUTO, Sampling.of(sampling))
    method = Method(pair.drafter, FixedLength(TIMED_LENGTH), verifier)
    decode_by(pair.model, method, sampling, prompts)
    return call_seconds(decode_by(pair.model, method, sampling, prompts))
