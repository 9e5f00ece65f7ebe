"""Choose how to draft by decoding the user's prompts, and write the choice.

The way of `drafttrain tune`: settings -> `make_candidates` (ways to decode, checked) ->
`search_all` (decodes them in rungs) -> `measure_finalists` (figures on other prompts) -> report,
page, policy.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from datasets import Dataset

from drafttrain.build.cascades import other_drafters
from drafttrain.build.method import Method, build_sampling, check_method
from drafttrain.build.pairs import Pair, check_pair, load_pair
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import TuneConfig
from drafttrain.config.kinds import NONE
from drafttrain.config.runs import head_folders, head_run_of
from drafttrain.config.trees import TREES
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.store import MANIFEST
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.evaluation.calibration import (
    CallSeconds,
    HeadFacts,
    OracleCounts,
    follow_oracle,
    judge_heads,
    stop_threshold,
)
from drafttrain.evaluation.candidates import (
    Candidate,
    Drafting,
    check_trees,
    make_candidates,
    most_drafted,
)
from drafttrain.evaluation.evaluate import write_evaluation
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.policy_file import default_policy_file, make_policy, write_policy_file
from drafttrain.evaluation.prompts import Prompt, PromptSet, read_prompts
from drafttrain.evaluation.report import Search, check_new_file, data_facts, plot_path, write_text
from drafttrain.evaluation.runner import decode_by
from drafttrain.evaluation.table_style import print_findings
from drafttrain.evaluation.tables import main_table
from drafttrain.evaluation.tune import (
    FINAL_SHARE,
    Bench,
    Clock,
    build_methods,
    choose,
    finalists,
    measure_finalists,
    search_all,
)
from drafttrain.evaluation.tune_page import head_table, tune_page, verdict_lines
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.loading import check_target
from drafttrain.models.speech import hears

MOST_ROWS = 512
"""Prompts to choose on, at most; the rungs seldom come to more."""
MOST_REPORTED = 200
"""Prompts for the final figures, at most."""
MOST_HEADS = 2
"""Heads that are tried, the best by held-out KL."""
HELD_OUT = "held_out_cache"
"""Folder of a run of heads with states and labels of held-out outputs."""
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
    check_new_file(settings.report, "report", (".json",))
    check_trees(settings.trees)
    drafting = Drafting.of(str(settings.drafter))
    if drafting.kind is NONE:
        raise ConfigError("drafter = 'none' drafts nothing, so there is nothing to tune; give one")
    judged, heads = choose_heads(settings)
    candidates = make_candidates(settings, drafting, heads, None)
    for one in candidates:
        check_method(one.decode)
    beside, trees, table = drafters_beside(settings, candidates)
    check_pair(settings.target, (str(settings.drafter), *beside), trees, table)
    rows, reported = split_rows(settings)
    fewest, largest = min(len(rows), len(reported)), max(settings.batch_sizes, default=1)
    if largest > fewest:
        raise ConfigError(
            f"batch_sizes = {largest}, but there are only {fewest} prompts to choose on or for the "
            "final figures, so that no batch would be full; give more prompts, or smaller batches"
        )
    if dry_run:
        print(plan_lines(settings, candidates, rows, reported))
        return
    pair = load_pair(settings.target, str(settings.drafter), beside, trees, table)
    model = CachedModel(pair.target.model)
    prompts = PromptSet(str(settings.data.path), *read_prompts(pair.target, model, rows))
    options = options_of(settings)
    seconds = time_calls(model, pair, prompts.prompts[:TIMED], options)
    drafting = replace(drafting, grows_trees=drafting.grows_trees and takes_trees(model, pair))
    threshold = stop_threshold(seconds, drafting.kind) if heads else None
    candidates = make_candidates(settings, drafting, heads, threshold)
    methods = build_methods(candidates, pair)
    bench = Bench(pair.target, model, candidates, methods, prompts.prompts, options)
    minutes = 60.0 * settings.minutes
    rungs = search_all(bench, Clock(began + (1.0 - FINAL_SHARE) * minutes))
    sizes = sorted({rung.batch_size for rung in rungs})
    choices = [choose([r for r in rungs if r.batch_size == size], candidates) for size in sizes]
    path = str((settings.report_data or settings.data).path)
    names = finalists(rungs, choices)
    found = measure_finalists(bench, names, reported, rungs, Clock(began + minutes), path)
    search = Search(
        drafter=str(settings.drafter),
        candidates={one.name: settings_of(one) for one in candidates},
        data=data_facts(prompts),
        minutes=(perf_counter() - began) / 60.0,
        rungs=rungs,
        choices=choices,
        t_draft=seconds.t_draft,
        t_target=seconds.t_target,
        threshold=threshold,
        heads=judged,
        oracle=oracle_of(bench, pair, reported, most_drafted(settings, drafting)),
    )
    report = found.report.model_copy(update={"search": search})
    write_evaluation(replace(found, report=report), settings.report)
    page = settings.report.with_suffix(".html")
    write_text(page, tune_page(report, plot_path(settings.report)))
    policy_file = settings.policy or default_policy_file(settings)
    by_name = {one.name: one for one in candidates}
    write_policy_file(make_policy(choices, by_name, asdict(options.sampling)), report, policy_file)
    print_findings(
        [main_table(report), head_table(report)],
        verdict_lines(report),
        [f"report: {settings.report}", f"page: {page}", f"policy: {policy_file}"],
    )


def choose_heads(settings: TuneConfig) -> tuple[list[HeadFacts], dict[str, Path]]:
    """Calibration of the heads on the held-out cache of their run, and the folders of those that
    are tried: the best by binary KL, or those with the fewest layers where there is no cache."""
    if settings.heads is None:
        return [], {}
    place = Path(str(settings.heads))
    found = {name: folder for folder in head_folders(place) for name in load_heads(folder)}
    run, judged = head_run_of(place), []
    if run is not None and (run.folder / HELD_OUT / MANIFEST).is_file():
        judged = judge_heads(load_heads(place), run.folder / HELD_OUT)
    names = [one.name for one in judged] or sorted(found)
    return judged, {name: found[name] for name in names[:MOST_HEADS]}


def split_rows(settings: TuneConfig) -> tuple[Dataset, Dataset]:
    """Rows to choose on and rows to report on, shuffled; without report_data a third of data is
    split off. Raises ConfigError where there are too few."""
    heard = hears(check_target(settings.target))
    rows = shuffled(load_inputs(settings.data, "data", heard))
    if settings.report_data is not None:
        reported = shuffled(load_inputs(settings.report_data, "report_data", heard))
        return first(rows, MOST_ROWS), first(reported, MOST_REPORTED)
    if len(rows) < 3:
        raise ConfigError(
            f"data.path = {settings.data.path!r} holds {len(rows)} prompts; give 3 at least (a "
            "third is split off for the final figures), or report_data"
        )
    own = len(rows) - len(rows) // 3
    chosen, reported = rows.select(range(own)), rows.select(range(own, len(rows)))
    return first(chosen, MOST_ROWS), first(reported, MOST_REPORTED)


def shuffled(rows: Dataset) -> Dataset:
    return rows.select(np.random.default_rng(0).permutation(len(rows)).tolist())


def first(rows: Dataset, most: int) -> Dataset:
    return rows.select(range(min(most, len(rows))))


def drafters_beside(
    settings: TuneConfig, candidates: Sequence[Candidate]
) -> tuple[list[str], bool, str | None]:
    """Drafters that have a part in some candidate beside the first one; whether the user gives
    candidates with trees; the table of max-gram. Raises ConfigError for several tables."""
    decodes = [one.decode for one in candidates]
    beside = sorted({name for decode in decodes for name in other_drafters(decode)})
    trees = any(TREES[one.tree.kind].shape is not None for one in settings.candidates.values())
    tables = sorted({decode.bigrams for decode in decodes if decode.bigrams is not None})
    if len(tables) > 1:
        raise ConfigError(f"bigrams = {tables}; give all candidates one table, or none")
    return beside, trees, next(iter(tables), None)


def takes_trees(model: CachedModel, pair: Pair) -> bool:
    """Whether both models can be given draft trees."""
    alone = pair.kind is None or not pair.kind.is_language_model
    return model.takes_branches and (alone or pair.drafter.model.takes_branches)


def options_of(settings: TuneConfig, seed: int | None = None) -> EvaluationOptions:
    """How all candidates decode. seed: another one than that of the settings."""
    sampling = settings.sampling
    return EvaluationOptions(
        build_sampling(sampling),
        sampling.max_new_tokens,
        sampling.seed if seed is None else seed,
        baselines=(),
        batch_sizes=sorted({1, *settings.batch_sizes}),
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
    plain = Method(NoDrafter(), FixedLength(1), build_verifier(AUTO, options.sampling))
    outputs = decode_by(bench.model, plain, prompts, options, 1)
    return follow_oracle(bench.model, pair.drafter, prompts, outputs, longest)


def settings_of(candidate: Candidate) -> dict[str, object]:
    """What of a candidate is not common to all, as a user would write it."""
    common = {"drafter", "sampling"}
    return candidate.decode.model_dump(mode="json", exclude_unset=True, exclude=common)


def plan_lines(
    settings: TuneConfig, candidates: Sequence[Candidate], rows: Dataset, reported: Dataset
) -> str:
    """What a tuning would do, without loading any weights or writing anything."""
    path = (settings.report_data or settings.data).path
    names = ", ".join(one.name for one in candidates)
    return "\n".join(
        [
            f"candidates   {1 + len(candidates)}: plain, {names}",
            f"prompts      {len(rows)} of {settings.data.path} to choose on, at most; "
            f"{len(reported)} of {path} for the final figures",
            f"batch sizes  {', '.join(map(str, sorted({1, *settings.batch_sizes})))}",
            f"minutes      {settings.minutes:g} at most",
            f"report       {settings.report}",
        ]
    )
