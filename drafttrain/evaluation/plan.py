"""What `drafttrain eval` will measure, checked before any weights are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from drafttrain.build.cascades import other_drafters
from drafttrain.build.method import check_method
from drafttrain.build.pairs import Pair, check_pair, load_pair
from drafttrain.build.trees import build_shape
from drafttrain.build.verifiers import AUTO
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, TreeConfig
from drafttrain.config.kinds import KINDS, NONE, copies_text, in_words, kind_of, named_kind
from drafttrain.config.trees import TREES
from drafttrain.config.verifiers import GREEDY
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.drafters.cascade import show_increments
from drafttrain.evaluation.engines.measure import ENGINES, check_engines
from drafttrain.evaluation.report import check_new_file
from drafttrain.evaluation.trees.rank_acceptance import needs_ranks, with_ranks
from drafttrain.models.drafters import read_drafter_settings, read_kind
from drafttrain.models.loading import cache_is_deep_enough, check_target
from drafttrain.models.prompts import prompt_layers
from drafttrain.models.speech import hears


@dataclass(frozen=True)
class Plan:
    """Methods and inputs, checked, and what has to be loaded for them."""

    settings: EvalConfig
    variants: list[DecodeConfig]
    """The methods of the drafter itself."""
    others: dict[str, DecodeConfig]
    """More methods, by the names that reports give them."""
    rows: Dataset
    rank_rows: Dataset | None
    """Prompts to measure acceptance by rank on, where a tree needs it."""
    companions: tuple[str, ...]
    """Every drafter beside the first one that has a part in some method."""
    table: str | None
    """Max-Gram's."""

    @property
    def methods(self) -> list[DecodeConfig]:
        return [*self.variants, *self.others.values()]

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
    if settings.mode == "teacher-forced":
        check_teacher_forced(settings, variants)
    elif settings.p_min:
        shown = ", ".join(f"{value:g}" for value in settings.p_min)
        raise ConfigError(
            f"p_min = {shown} counts for mode teacher-forced only, where nothing is decoded; leave "
            "it out, or give --mode teacher-forced (here: --stop confidence)"
        )
    heard = hears(check_target(settings.target))
    rows = load_inputs(settings.data, heard=heard)
    check_batch_sizes(settings, len(rows))
    rank_rows = load_rank_rows(settings, variants, heard)
    others = {name: other_method(settings, name) for name in settings.others}
    known = variants if rank_rows is None else with_ranks(variants, (1.0,))
    for method in [*known, *others.values()]:
        check_method(method)
    methods = [*variants, *others.values()]
    check_assisted(settings, methods)
    check_engines(settings)
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


def can_assist(drafter: str) -> bool:
    """Whether a drafter is a language model that reads prompts itself, as Transformers' own
    assisted generation has it."""
    if not read_kind(drafter).is_language_model:
        return False
    return not prompt_layers(read_drafter_settings(drafter))


def _max_grams_table(methods: Sequence[DecodeConfig]) -> str | None:
    """Raises ConfigError where max-gram has a table in one method and another, or none, in
    another: there is one max-gram."""
    copying = [m for m in methods if any(map(copies_text, (m.drafter, *other_drafters(m))))]
    tables = {method.bigrams for method in copying}
    if len(tables) > 1:
        shown = " and ".join(sorted(map(repr, tables)))
        raise ConfigError(f"bigrams = {shown}; give all methods with max-gram one table, or none")
    return tables.pop() if tables else None


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


def check_teacher_forced(settings: EvalConfig, variants: Sequence[DecodeConfig]) -> None:
    """This mode reads acceptance off the target's own outputs; refuse what it cannot tell."""
    remedy = "; leave it out, or use --mode decode"
    if max(settings.batch_sizes, default=1) > 1:
        shown = ", ".join(map(str, settings.batch_sizes))
        raise ConfigError(f"batch_sizes = {shown}, but teacher-forced acceptance has none{remedy}")
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
    drafter = read_drafter_settings(str(settings.decode.drafter))
    kind = kind_of(drafter)
    if kind.blocks_along is None:
        known = in_words([kind for kind in KINDS.values() if kind.blocks_along is not None])
        raise ConfigError(
            f"drafter {settings.decode.drafter!r} is a {drafter.model_type!r} model, but "
            f"teacher-forced acceptance is of blocks as those of {known}; use --mode decode"
        )
    if can_assist(str(settings.decode.drafter)):
        return check_chains(variants, remedy)
    words = kind.words
    if prompt_layers(drafter):
        words += " whose prompt the target reads"
    if settings.decode.sampling.temperature > 0:
        raise ConfigError(
            f"temperature = {settings.decode.sampling.temperature} is sampling, but teacher-forced "
            f"acceptance of {words} is of greedy decoding{remedy}"
        )
    if settings.p_min:
        raise ConfigError(
            f"p_min is a setting of llama.cpp, which does not draft with {words}; leave it out"
        )
    longest = max(variant.stop.k for variant in variants)
    if kind.drafts == "blocks" and longest > drafter.k:
        raise ConfigError(
            f"k = {longest}, but teacher-forced acceptance is known up to the k = {drafter.k} that "
            "the drafter was trained with; use --mode decode"
        )
    check_chains(variants, remedy)


def check_chains(variants: Sequence[DecodeConfig], remedy: str) -> None:
    """Refuse drafts that are no chains of a fixed length, and rules that may change the output."""
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


def plan_lines(plan: Plan) -> list[str]:
    """What would be measured, a line each."""
    settings, sampling = plan.settings, plan.settings.decode.sampling
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
    times = f"each decoded {settings.repeats} times"
    return [
        f"target    {settings.target.path} ({settings.target.dtype}), {how}, "
        f"{sampling.max_new_tokens} tokens",
        f"data      {settings.data.path}: {len(plan.rows):,} inputs, {times}",
        *[f"method    {describe(method)}" for method in plan.methods],
        *[f"baseline  {describe_baseline(name, settings)}" for name in settings.baselines],
        *_batch_lines(settings),
        f"report    {settings.report}",
    ]


def describe_baseline(name: str, settings: EvalConfig) -> str:
    """A baseline as the plan names it."""
    if name == "beam":
        return f"generate, {settings.num_beams} beams"
    if name in ENGINES:
        return f"{name}, alone in a process of its own"
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
