"""What `drafttrain eval` will measure, checked before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from drafttrain.build.cascades import other_drafters
from drafttrain.build.method import check_method
from drafttrain.build.pairs import Pair, check_pair, load_pair
from drafttrain.build.trees import build_shape
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import Baseline, EvalConfig
from drafttrain.config.decode import DecodeConfig, TreeConfig
from drafttrain.config.kinds import NONE, copies_text, named_kind
from drafttrain.config.trees import TREES
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.cascade import show_increments
from drafttrain.evaluation.forced.checks import check_teacher_forced
from drafttrain.evaluation.others import OtherMethod, other_methods
from drafttrain.evaluation.report import check_new_file
from drafttrain.evaluation.trees.rank_acceptance import needs_ranks, with_ranks
from drafttrain.models.drafters import can_assist, read_drafter_settings
from drafttrain.models.loading import cache_is_deep_enough, check_target
from drafttrain.models.speech import hears


@dataclass(frozen=True)
class Plan:
    """Methods and inputs, checked, and what has to be loaded for them."""

    settings: EvalConfig
    variants: list[DecodeConfig]
    """The methods of the drafter itself."""
    others: list[OtherMethod]
    """More methods."""
    rows: Dataset
    rank_rows: Dataset | None
    """Prompts to measure acceptance by rank on, where a tree needs it."""
    companions: tuple[str, ...]
    """Every drafter beside the first one that has a part in some method."""
    table: str | None
    """Max-Gram's."""

    @property
    def methods(self) -> list[DecodeConfig]:
        return [*self.variants, *(other.config for other in self.others)]

    @property
    def drafter(self) -> str:
        return str(self.settings.decode.drafter)

    @property
    def trees(self) -> bool:
        return any(TREES[method.tree.kind].shape is not None for method in self.methods)

    def check_pair(self) -> None:
        """Check target and drafters against each other, without reading weights."""
        names = (self.drafter, *self.companions)
        check_pair(self.settings.target, names, self.trees, self.table)

    def load_pair(self) -> Pair:
        target, trees = self.settings.target, self.trees
        return load_pair(target, self.drafter, self.companions, trees, self.table)


def make_plan(settings: EvalConfig, variants: Sequence[DecodeConfig]) -> Plan:
    """Read the inputs and check everything but the weights.

    variants: the methods of the drafter. Raises ValueError for settings that do not go together.
    """
    check_new_file(settings.report, "report", (".json",))
    others = other_methods(settings)
    if settings.mode == "teacher-forced":
        check_teacher_forced(settings, variants, others)
    elif settings.p_min:
        shown = ", ".join(f"{value:g}" for value in settings.p_min)
        raise ConfigError(
            f"p_min = {shown} counts for mode teacher-forced only, where nothing is decoded; leave "
            "it out, or give --mode teacher-forced (here: --stop confidence)"
        )
    elif not settings.served:
        raise ConfigError(
            "served = false counts for mode teacher-forced only, where nothing is decoded; leave "
            "it out, or give --mode teacher-forced"
        )
    heard = hears(check_target(settings.target))
    rows = load_inputs(settings.data, heard=heard)
    check_batch_sizes(settings, len(rows))
    rank_rows = load_rank_rows(settings, variants, heard)
    known = variants if rank_rows is None else with_ranks(variants, (1.0,))
    beside = [other.config for other in others]
    for method in [*known, *beside]:
        check_method(method)
    methods = [*variants, *beside]
    check_assisted(settings, methods)
    named = {str(method.drafter) for method in methods}.union(*map(other_drafters, methods))
    companions = tuple(sorted(named - {str(settings.decode.drafter)}))
    table = _max_grams_table(methods)
    return Plan(settings, list(variants), others, rows, rank_rows, companions, table)


def check_batch_sizes(settings: EvalConfig, inputs: int) -> None:
    """Raises ConfigError for batches that so many inputs would never fill."""
    largest = max(settings.batch_sizes, default=1)
    if largest > inputs:
        raise ConfigError(
            f"batch_sizes = {largest}, but there are {inputs} inputs, so that no batch would be "
            f"full; give at least {settings.wave_batches * largest} inputs, or smaller batches"
        )


def check_assisted(settings: EvalConfig, methods: Sequence[DecodeConfig]) -> None:
    """Raises ConfigError where assisted generation is asked for and no drafter can assist."""
    if "assisted" not in settings.baselines:
        return
    drafters = {str(method.drafter) for method in methods}
    able = [name for name in sorted(drafters) if can_assist(name)]
    if not able:
        raise ConfigError(
            "baselines has 'assisted', which drafts with a language model, but drafter = "
            f"{', '.join(map(repr, sorted(drafters)))}; give one as drafter or among others "
            "(others.NAME.drafter=MODEL), or leave 'assisted' out"
        )
    for name in able:
        if not cache_is_deep_enough(read_drafter_settings(name)):
            raise ConfigError(
                f"baselines has 'assisted', but Transformers' assisted generation fails where a "
                f"drafter's decoder is deeper than its encoder (T5), as that of {name!r} is; leave "
                "'assisted' out, or give another drafter"
            )


def _max_grams_table(methods: Sequence[DecodeConfig]) -> str | None:
    """Raises ConfigError where max-gram has a table in one method and another, or none, in
    another: there is one max-gram."""
    copying = [m for m in methods if any(map(copies_text, (m.drafter, *other_drafters(m))))]
    tables = {method.bigrams for method in copying}
    if len(tables) > 1:
        shown = " and ".join(sorted(map(repr, tables)))
        raise ConfigError(f"bigrams = {shown}; give all methods with max-gram one table, or none")
    return tables.pop() if tables else None


def load_rank_rows(
    settings: EvalConfig, variants: Sequence[DecodeConfig], heard: bool = False
) -> Dataset | None:
    """Prompts to measure acceptance by rank on, where a tree needs it.

    Raises ConfigError where it is needed and not given, or given for nothing.
    """
    needed = any(needs_ranks(variant) for variant in variants)
    if settings.rank_data is None:
        if needed:
            build_shape(TreeConfig(kind="sequoia"), 1)  # raises: by_rank is missing
        return None
    if not needed:
        raise ConfigError(
            "rank_data is given, but no sequoia tree lacks tree.by_rank; leave it out, or measure "
            "a sequoia tree"
        )
    return load_inputs(settings.rank_data, "rank_data", heard)


def plan_lines(plan: Plan) -> list[str]:
    """What would be measured, a line each."""
    settings, sampling = plan.settings, plan.settings.decode.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    times = f"each decoded {settings.repeats} times"
    if settings.mode == "teacher-forced":
        timed = min(settings.timing_prompts, len(plan.rows))
        times = f"each decoded plainly; {timed} decoded {settings.repeats} times for costs"
    return [
        f"target    {settings.target.path} ({settings.target.dtype}), {how}, "
        f"{sampling.max_new_tokens} tokens",
        f"data      {settings.data.path}: {len(plan.rows):,} inputs, {times}",
        *[f"method    {describe(method)}" for method in plan.methods],
        *[f"baseline  {describe_baseline(name, settings)}" for name in _baselines(settings)],
        *_batch_lines(settings),
        f"report    {settings.report}",
    ]


def _baselines(settings: EvalConfig) -> tuple[Baseline, ...]:
    """Those that are measured: nothing is decoded for comparison in teacher-forced mode."""
    return settings.baselines if settings.mode == "decode" else ()


def describe_baseline(name: str, settings: EvalConfig) -> str:
    """A baseline as the plan names it."""
    if name == "beam":
        return f"generate, {settings.num_beams} beams"
    return f"{name} generation, batch size 1" if name == "assisted" else name


def _batch_lines(settings: EvalConfig) -> list[str]:
    """The batch sizes, where there are others than 1."""
    if max(settings.batch_sizes, default=1) == 1:
        return []
    shown = ", ".join(map(str, sorted({1, *settings.batch_sizes})))
    return [f"batches   {shown}, in waves of {settings.wave_batches} batches or more"]


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
