"""Measure a drafter on a target and inputs, and leave report.json, samples and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from datasets import Dataset
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.build.cascades import other_drafters
from drafttrain.build.method import (
    Method,
    build_method,
    build_sampling,
    check_method,
)
from drafttrain.build.pairs import Pair, check_pair, load_pair
from drafttrain.build.trees import build_shape, tree_settings
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, TreeConfig
from drafttrain.config.kinds import KINDS, NONE, copies_text, in_words, kind_of, named_kind
from drafttrain.config.sweep import expand_sweep
from drafttrain.config.trees import TREES
from drafttrain.config.verifiers import GREEDY
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.cascade import show_increments
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.evaluation.plots import plot_report
from drafttrain.evaluation.report import (
    Report,
    plot_path,
    samples_path,
    write_report,
    write_samples,
)
from drafttrain.evaluation.runner import build_options, read_prompts
from drafttrain.evaluation.summary import Evaluation, evaluate, evaluate_teacher_forced
from drafttrain.evaluation.tables import main_table, parity_lines, trade_off_table
from drafttrain.evaluation.trees.methods import expand_methods
from drafttrain.evaluation.trees.rank_acceptance import measure_acceptance_by_rank
from drafttrain.evaluation.trees.tables import tree_table
from drafttrain.models.drafters import read_drafter_settings

LOG_WIDTH = 132


def measure(settings: EvalConfig, dry_run: bool = False) -> None:
    """Run the evaluation that the settings describe, write its files, print its tables.

    dry_run: only say what would be measured, once all has been checked but the weights.

    Raises ValueError, before any model loads, for settings that do not go together.
    """
    assert settings.target is not None and settings.data is not None and settings.report is not None
    check_report_path(settings.report)
    variants = list_variants(settings)
    if settings.mode == "teacher-forced":
        check_teacher_forced(settings, variants)
    rows = load_inputs(settings.data)
    ranked = load_rank_data(settings, variants)
    others = [other_method(settings, name) for name in settings.others]
    for variant in [*(variants if ranked is None else with_ranks(variants, (1.0,))), *others]:
        check_method(variant)
    wanted = Wanted.by(str(settings.decode.drafter), [*variants, *others])
    if dry_run:
        check_pair(
            settings.target, (wanted.drafter, *wanted.companions), wanted.trees, wanted.table
        )
        print_plan(settings, [*variants, *others], len(rows))
        return
    pair = load_pair(settings.target, wanted.drafter, wanted.companions, wanted.trees, wanted.table)
    if settings.mode == "decode":
        if ranked is not None:
            variants = with_ranks(variants, measure_ranks(settings, pair, ranked))
        evaluation = measure_decoding(settings, variants, pair, rows)
    else:
        evaluation = Evaluation(measure_teacher_forced(settings, variants, pair, rows), [])
    report = evaluation.report
    write_report(report, settings.report)
    if evaluation.samples:
        write_samples(evaluation.samples, samples_path(settings.report))
    plot_report(report, plot_path(settings.report))
    print_report(report, settings.report)


@dataclass(frozen=True)
class Wanted:
    """What has to be loaded for some methods."""

    drafter: str
    companions: tuple[str, ...]
    """Every other drafter that has a part in some method."""
    trees: bool
    table: str | None
    """Max-Gram's."""

    @staticmethod
    def by(drafter: str, methods: Sequence[DecodeConfig]) -> Wanted:
        """Raises ConfigError where max-gram has a table in one method and another, or none, in
        another: there is one max-gram."""
        named = {str(method.drafter) for method in methods} - {drafter}
        for method in methods:
            named |= set(other_drafters(method))
        copying = [m for m in methods if any(map(copies_text, (m.drafter, *other_drafters(m))))]
        tables = {method.bigrams for method in copying}
        if len(tables) > 1:
            shown = " and ".join(sorted(map(repr, tables)))
            raise ConfigError(
                f"bigrams = {shown}; give all methods with max-gram one table, or none"
            )
        trees = any(TREES[method.tree.kind].shape is not None for method in methods)
        return Wanted(drafter, tuple(sorted(named)), trees, tables.pop() if tables else None)


def other_method(settings: EvalConfig, name: str) -> DecodeConfig:
    """Another method to measure, decoding as all do. Raises ConfigError where it would not."""
    other = settings.others[name]
    if "sampling" in other.model_fields_set:
        raise ConfigError(
            f"others.{name}.sampling is given, but all methods decode as decode.sampling says; "
            "leave it out"
        )
    if other.drafter is None or named_kind(other.drafter) is NONE:
        raise ConfigError(
            f"others.{name}.drafter = {other.drafter!r}; give a drafter (plain decoding is "
            "measured in any case)"
        )
    return other.model_copy(update={"sampling": settings.decode.sampling})


def print_plan(settings: EvalConfig, methods: Sequence[DecodeConfig], rows: int) -> None:
    """What would be measured, a line each."""
    target, sampling = settings.target, settings.decode.sampling
    assert target is not None and settings.data is not None
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    print(f"target    {target.path} ({target.dtype}), {how}, {sampling.max_new_tokens} tokens")
    print(f"data      {settings.data.path}: {rows:,} inputs, each decoded {settings.repeats} times")
    for method in methods:
        print(f"method    {describe(method)}")
    for name in settings.baselines:
        print(f"baseline  generate{'' if name == 'generate' else f', {settings.num_beams} beams'}")
    print(f"report    {settings.report}")


def describe(method: DecodeConfig) -> str:
    """The settings of a method that tell it from others."""
    words = [str(method.drafter)]
    if method.cascade is not None:
        words = [" > ".join((*words, *method.cascade.drafters))]
        words.append(f"increments {show_increments(method.cascade.matrix())}")
        words.append(f"leniency {method.cascade.leniency:g}")
    elif TREES[method.tree.kind].shape is not None:
        words.append(f"tree {method.tree.kind}")
    if named_kind(method.drafter) is not NONE and method.cascade is None:
        words.append(f"stop {method.stop.kind}, k {method.stop.k}")
    return "; ".join((*words, f"verifier {method.verifier.kind}"))


def list_variants(settings: EvalConfig) -> list[DecodeConfig]:
    """The methods to measure: those compared by depth and budget, or a sweep of one.

    Raises ConfigError for both at once.
    """
    if not (settings.methods or settings.depth or settings.budget):
        return expand_sweep(settings.decode, settings.sweep)
    if settings.sweep:
        raise ConfigError("methods and sweep are both given; measure them one after the other")
    if settings.mode != "decode":
        raise ConfigError(f"methods are compared by decoding, not --mode {settings.mode}")
    return expand_methods(settings.decode, settings.methods, settings.depth, settings.budget)


def load_rank_data(settings: EvalConfig, variants: Sequence[DecodeConfig]) -> Dataset | None:
    """Prompts to measure acceptance by rank on, where a tree needs it.

    Raises ConfigError where it is needed and not given, or given for nothing.
    """
    needed = any(v.tree.kind == "sequoia" and v.tree.by_rank is None for v in variants)
    if settings.rank_data is None:
        if needed:
            build_shape(TreeConfig(kind="sequoia"), 1)  # raises: by_rank is missing
        return None
    if not needed:
        raise ConfigError(
            "rank_data is given, but no sequoia tree lacks tree.by_rank; leave it out, or add "
            "sequoia to --methods"
        )
    return load_inputs(settings.rank_data, "rank_data")


def measure_ranks(settings: EvalConfig, pair: Pair, rows: Dataset) -> tuple[float, ...]:
    """Acceptance by rank on these rows, printed too."""
    model = CachedModel(pair.target.model)
    prompts, _ = read_prompts(pair.target, model, rows)
    sampling = settings.decode.sampling
    by_rank = measure_acceptance_by_rank(
        model,
        pair.drafter,
        build_sampling(sampling),
        partial(sequence_randomness, sampling.seed, device=model.device),
        [prompt.source for prompt in prompts],
        sampling.max_new_tokens,
    )
    shares = ", ".join(f"{share:.3f}" for share in by_rank)
    print(f"acceptance by rank on {len(prompts)} prompts of {settings.rank_data.path}: {shares}")
    return by_rank


def with_ranks(variants: Sequence[DecodeConfig], by_rank: tuple[float, ...]) -> list[DecodeConfig]:
    """The variants with this acceptance by rank where a tree needs it and has none."""
    return [
        variant.model_copy(update={"tree": variant.tree.model_copy(update={"by_rank": by_rank})})
        if variant.tree.kind == "sequoia" and variant.tree.by_rank is None
        else variant
        for variant in variants
    ]


def measure_decoding(
    settings: EvalConfig, variants: list[DecodeConfig], pair: Pair, rows: Dataset
) -> Evaluation:
    """The truth: every variant, plain decoding and the baselines decode all rows, interleaved."""
    methods = [build_method(variant, pair) for variant in variants]
    for name in settings.others:
        other = other_method(settings, name)
        same = other.drafter == settings.decode.drafter
        led = pair if same else pair.led_by(str(other.drafter))
        methods.append(replace(build_method(other, led), label=name))
    if settings.methods:  # a chain is a tree of width one
        methods = [
            method
            if "nodes" in method.settings
            else replace(method, settings=chain_settings(method))
            for method in methods
        ]
    return evaluate(
        pair.target,
        CachedModel(pair.target.model),
        methods,
        rows,
        build_options(settings),
        str(settings.data.path),
        progress=True,
    )


def chain_settings(method: Method) -> dict[str, float]:
    return tree_settings(TreeConfig(), method.stop.longest)


def measure_teacher_forced(
    settings: EvalConfig, variants: list[DecodeConfig], pair: Pair, rows: Dataset
) -> Report:
    """Strict acceptance at each k, from one drafter pass along each of the target's own outputs."""
    model = pair.drafter_model
    assert model is not None
    options = build_options(settings)
    cached = CachedModel(pair.target.model)
    prompts, _ = read_prompts(pair.target, cached, rows)
    outputs = Decoder(
        cached,
        NoDrafter(),
        FixedLength(1),
        build_verifier(AUTO, options.sampling),
        options.sampling,
        partial(sequence_randomness, options.seed),
    ).decode_all([prompt.source for prompt in prompts], options.max_new_tokens)
    pairs = [
        (prompt.source.input_ids.tolist(), output.tokens)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    drafters = [
        (pair.drafter.name, variant.stop.k, partial(first_slots, model, variant.stop.k))
        for variant in variants
    ]
    return evaluate_teacher_forced(pair.target, drafters, pairs, options, str(settings.data.path))


def first_slots(model: PreTrainedModel, k: int, source_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Blocks cut to k. Shapes: [S], [L] -> [L, k]."""
    predict = kind_of(model.config).blocks_along
    assert predict is not None
    return resolve_name(predict)(model, source_ids, target_ids)[:, :k]


def check_report_path(report: Path) -> None:
    if report.suffix != ".json" or report.is_dir():
        raise ConfigError(f"report = {str(report)!r} is no file name ending in .json; give one")
    nearest = next(parent for parent in report.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ConfigError(f"report = {str(report)!r}: {str(nearest)!r} is a file, not a folder")


def check_teacher_forced(settings: EvalConfig, variants: list[DecodeConfig]) -> None:
    """This mode counts greedy matches of a drafter; refuse settings that ask for anything else."""
    remedy = "; leave it out, or use --mode decode"
    if named_kind(settings.decode.drafter) is not None:
        raise ConfigError(
            f"drafter = {settings.decode.drafter!r} has no acceptance to estimate{remedy}"
        )
    if settings.others:
        raise ConfigError(f"others = {', '.join(settings.others)} are decoded{remedy}")
    if settings.decode.cascade is not None:
        raise ConfigError(
            "teacher-forced acceptance is of one drafter's blocks, but a cascade is asked for"
            f"{remedy}"
        )
    if settings.decode.sampling.temperature > 0:
        raise ConfigError(
            f"temperature = {settings.decode.sampling.temperature} is sampling, but teacher-forced "
            f"acceptance is of greedy decoding{remedy}"
        )
    drafter = read_drafter_settings(str(settings.decode.drafter))
    if kind_of(drafter).blocks_along is None:
        known = in_words([kind for kind in KINDS.values() if kind.blocks_along is not None])
        raise ConfigError(
            f"drafter {settings.decode.drafter!r} is a {drafter.model_type!r} model, but "
            f"teacher-forced acceptance is of blocks as those of {known}; use --mode decode"
        )
    longest = max(variant.stop.k for variant in variants)
    if longest > drafter.k:
        raise ConfigError(
            f"k = {longest}, but teacher-forced acceptance is known up to the k = {drafter.k} that "
            "the drafter was trained with; use --mode decode"
        )
    for variant in variants:
        if TREES[variant.tree.kind].shape is not None:
            raise ConfigError(
                f"tree.kind = {variant.tree.kind!r} drafts trees, but teacher-forced acceptance is "
                f"of chains{remedy}"
            )
        if variant.verifier.kind not in (AUTO.kind, GREEDY.name):
            raise ConfigError(
                f"verifier {variant.verifier.kind!r} accepts other tokens than the target's own, "
                f"which teacher-forced acceptance cannot follow{remedy}"
            )
        if variant.stop.kind != "fixed":
            raise ConfigError(
                f"stop policy {variant.stop.kind!r} drafts different lengths, but teacher-forced "
                f"acceptance is of fixed ones{remedy}"
            )


def print_report(report: Report, path: Path) -> None:
    """The tables, what parity showed, and where the files lie."""
    console = Console()
    if not console.is_terminal:  # a log file has room for whole columns
        console = Console(width=LOG_WIDTH)
    console.print(main_table(report))
    for table in (trade_off_table(report), tree_table(report)):
        if table is not None:
            console.print(table)
    for line in parity_lines(report):
        console.print(line, highlight=False, markup=False)
    console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
