"""Find a cascade's increments: measure costs, replay candidates, report, write cascade.yaml."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import yaml

from drafttrain.build.cascades import build_levels, cascade_ratios
from drafttrain.build.method import build_method, build_sampling, check_method
from drafttrain.build.pairs import Pair, load_pair
from drafttrain.config.commands import TuneCascadeConfig
from drafttrain.config.decode import CascadeConfig, DecodeConfig
from drafttrain.decoding.drafters.cascade import Level
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.cascades.candidates import Candidate, kind_of, neighbours, propose
from drafttrain.evaluation.cascades.report import (
    CandidateResult,
    CascadeReport,
    ReplayedCalls,
    results,
    summarise,
)
from drafttrain.evaluation.cascades.search import (
    CascadeReplay,
    Halving,
    Searched,
    search,
    search_around,
)
from drafttrain.evaluation.cascades.tables import cascade_lines, cascade_table
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.metrics import count_rounds, mean_target_seconds, measured_costs
from drafttrain.evaluation.options import TIMING_REPEATS, timing_options
from drafttrain.evaluation.prompts import PromptSet, both_in_words, load_both, read_both
from drafttrain.evaluation.report import (
    check_new_file,
    data_facts,
    target_facts,
    write_json,
    write_text,
)
from drafttrain.evaluation.runner import decode_interleaved
from drafttrain.evaluation.table_style import print_findings

REPORT = "tune-cascade.json"


@dataclass(frozen=True)
class Bench:
    """What a search works on, loaded and checked."""

    settings: TuneCascadeConfig
    decode: DecodeConfig
    """The default cascade."""
    pair: Pair
    target: CachedModel
    levels: list[Level]
    choosing: PromptSet
    """Prompts to choose on."""
    reporting: PromptSet | None
    """Prompts that choose nothing."""


def tune_cascade(settings: TuneCascadeConfig, dry_run: bool = False) -> None:
    """Run the search that the settings describe, write its files, print its table.

    dry_run: only print what would be done.

    Raises ValueError, before any weights load, for settings that do not go together.
    """
    if dry_run:
        print(plan_search(settings))
        return
    decode = check_tuning(settings)
    bench = open_bench(settings, decode)
    costs = level_costs(bench)
    began = perf_counter()
    sampling, limit = build_sampling(settings.sampling), settings.sampling.max_new_tokens
    replay = CascadeReplay(bench.target, bench.levels, sampling, limit, settings.sampling.seed)
    searched = find_increments(bench, replay, costs)
    seconds = perf_counter() - began
    report = make_report(bench, replay, searched, costs, seconds)
    write_json(report, report_path(settings.out))
    write_text(settings.out, cascade_yaml(report, settings))
    print_findings(
        [cascade_table(report)],
        cascade_lines(report),
        [f"cascade: {settings.out}", f"report: {report_path(settings.out)}"],
    )


def check_tuning(settings: TuneCascadeConfig) -> DecodeConfig:
    """The default cascade, with the settings checked before anything is loaded.

    Raises ConfigError for settings that cannot work.
    """
    check_new_file(settings.out, "out", (".yaml", ".yml"))
    decode = decoding(settings, CascadeConfig(drafters=settings.cascade))
    check_method(decode)
    if max(settings.leniency) > 1:  # refused where it counts for nothing
        lenient = CascadeConfig(drafters=settings.cascade, leniency=max(settings.leniency))
        check_method(decoding(settings, lenient))
    return decode


def decoding(settings: TuneCascadeConfig, cascade: CascadeConfig) -> DecodeConfig:
    """The method that a cascade is."""
    return DecodeConfig(
        drafter=settings.drafter,
        bigrams=settings.bigrams,
        cascade=cascade,
        sampling=settings.sampling,
    )


def open_bench(settings: TuneCascadeConfig, decode: DecodeConfig) -> Bench:
    """Load inputs and models, the small things first, and tokenise the prompts."""
    rows = load_both(settings)
    pair = load_pair(settings.target, settings.drafter, settings.cascade, bigrams=settings.bigrams)
    target = CachedModel(pair.target.model)
    choosing, reporting = read_both(pair.target, target, settings, rows)
    levels = build_levels(decode, pair)
    return Bench(settings, decode, pair, target, levels, choosing, reporting)


def level_costs(bench: Bench) -> dict[str, float]:
    """What a call of each level costs, in target calls, as the settings ask.

    Measured: mean seconds of a call in the default cascade over those of a call of the target that
    decodes plainly, both on the same prompts, in turn. Raises ValueError for a level that made no
    call there.
    """
    if bench.settings.costs == "parameters":
        return cascade_ratios(bench.decode, bench.pair)
    options = timing_options(bench.settings.sampling)
    method = build_method(bench.decode, bench.pair)
    prompts = bench.choosing.prompts[: bench.settings.timing_prompts]
    plain, default = decode_interleaved(
        bench.pair.target, bench.target, [method], prompts, options, progress=True
    )
    counts = count_rounds(default.outputs)
    names = [level.name for level in bench.levels]
    idle = [name for name in names if name not in counts.calls or not counts.calls[name].sum()]
    if idle:
        raise ValueError(
            f"{idle[0]!r} made no call on the {len(prompts)} timing prompts, so its cost is not "
            "known; raise sampling.max_new_tokens or timing_prompts, or give costs=parameters"
        )
    return measured_costs(counts, names, mean_target_seconds(plain.outputs))


def find_increments(bench: Bench, replay: CascadeReplay, costs: dict[str, float]) -> Searched:
    """Successive halving over the candidates, then the neighbours of the best."""
    settings, prompts = bench.settings, bench.choosing.prompts
    kinds = [kind_of(level) for level in bench.levels]
    candidates = propose(
        kinds,
        bench.decode.cascade.matrix(),
        settings.leniency,
        settings.candidates,
        settings.sampling.seed,
    )

    def replayed(prompt: int, some: list[Candidate]) -> list:
        return replay.replay(prompts[prompt], some)

    halving = Halving(settings.first_prompts, settings.finalists)
    searched = search(candidates, len(prompts), replayed, costs, halving, progress=True)
    if not settings.local:
        return searched
    near = neighbours(searched.best, kinds)
    return search_around(searched, near, len(prompts), replayed, costs, progress=True)


def make_report(
    bench: Bench,
    replay: CascadeReplay,
    searched: Searched,
    costs: dict[str, float],
    seconds: float,
) -> CascadeReport:
    settings, sampling = bench.settings, bench.settings.sampling
    found = results(searched, costs, settings.bootstrap)
    finished = {one.name: one for one in searched.finished}
    ranked = [finished[result.name] for result in found if result.name in finished]
    default = next(iter(searched.outputs))
    alone = next(one for one in ranked if one.origin == "first level alone")
    calls = {
        name: ReplayedCalls(asked=record.asked, made=record.made)
        for name, record in replay.records.items()
    }
    reported = report_on(bench, replay, [searched.best, default, alone], costs)
    paths = [settings.drafter, *settings.cascade]
    return CascadeReport(
        target=target_facts(bench.pair.target),
        levels={level.name: path for level, path in zip(bench.levels, paths, strict=True)},
        sampling=asdict(build_sampling(sampling)),
        max_new_tokens=sampling.max_new_tokens,
        costs=costs,
        costs_from=settings.costs,
        timing_prompts=min(settings.timing_prompts, len(bench.choosing.prompts))
        if settings.costs == "measured"
        else 0,
        data=data_facts(bench.choosing),
        rungs=searched.rungs,
        candidates=found,
        best=searched.best.name,
        default=default.name,
        first_alone=alone.name,
        reported_data=None if bench.reporting is None else data_facts(bench.reporting),
        reported=reported,
        replayed=calls,
        seconds=seconds,
        environment=describe_environment(),
    )


def report_on(
    bench: Bench, replay: CascadeReplay, chosen: list[Candidate], costs: dict[str, float]
) -> list[CandidateResult]:
    """What was chosen, on the prompts that chose nothing; empty where there are none."""
    if bench.reporting is None:
        return []
    chosen = list(dict.fromkeys(chosen))
    played = [replay.replay(prompt, chosen) for prompt in bench.reporting.prompts]
    outputs = [list(of_one) for of_one in zip(*played, strict=True)]
    return [
        summarise(one, its, costs, bench.settings.bootstrap, outputs[0])
        for one, its in zip(chosen, outputs, strict=True)
    ]


def cascade_yaml(report: CascadeReport, settings: TuneCascadeConfig) -> str:
    """Settings of `drafttrain eval` and `generate`, with what the choice rests on above them."""
    best = report.find(report.best)
    cascade = CascadeConfig(
        drafters=settings.cascade, increments=best.increments, leniency=best.leniency
    )
    content = {
        "target": settings.target.model_dump(mode="json", exclude_defaults=True),
        "decode": decoding(settings, cascade).model_dump(mode="json", exclude_defaults=True),
    }
    swi, costs = best.metrics["swi"], report.costs.items()
    machine = report.environment.gpu or report.environment.cpu
    about = [
        "Increments found by `drafttrain tune-cascade`. To measure them:",
        f"  drafttrain eval --config {settings.out} --data FILE",
        f"target: {report.target.path}",
        f"a call in target calls, {report.costs_from}: "
        + ", ".join(f"{name} {cost:.4f}" for name, cost in costs),
        f"chosen on: {report.data.prompts} inputs of {report.data.path}, "
        f"SWI {swi.value:.3f} ({swi.low:.3f} to {swi.high:.3f})",
        f"machine: {machine}, {report.environment.threads} threads; {report.environment.date}",
    ]
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return "".join(f"# {' '.join(line.splitlines())}\n" for line in about) + text


def report_path(out: Path) -> Path:
    """tune-cascade.json beside cascade.yaml; NAME.tune-cascade.json beside NAME.yaml."""
    return out.with_name(REPORT if out.stem == "cascade" else f"{out.stem}.{REPORT}")


def plan_search(settings: TuneCascadeConfig) -> str:
    """What a search would do, without loading any weights or writing anything."""
    check_tuning(settings)
    costs = "parameters over the target's"
    if settings.costs == "measured":
        costs = f"measured on {settings.timing_prompts} prompts {TIMING_REPEATS} times"
    return "\n".join(
        [
            f"levels      {', '.join([settings.drafter, *settings.cascade])}",
            f"candidates  {settings.candidates}, on {settings.first_prompts} prompts first",
            f"leniency    {', '.join(f'{one:g}' for one in settings.leniency)}",
            f"prompts     {both_in_words(settings)}",
            f"costs       {costs}",
            f"out         {settings.out}, {report_path(settings.out)}",
        ]
    )
