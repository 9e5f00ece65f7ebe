"""The plan of `drafttrain eval`, checked before any weights are read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from datasets import Dataset
from transformers import PretrainedConfig

from drafttrain.build.drafts import level_names
from drafttrain.build.method import Method, build_method
from drafttrain.build.pairing import Drafters, check_methods
from drafttrain.build.pairs import Pair, check_pair
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.kinds import NONE, named_kind
from drafttrain.config.methods import TREES
from drafttrain.data.inputs.prompts import load_prompts
from drafttrain.data.inputs.rows import describe_inputs
from drafttrain.decoding.drafters.tree import GrowingDrafter, TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.trees.fixed import Fixed
from drafttrain.decoding.trees.verifiers import TargetWalk
from drafttrain.evaluation.prompts import Prompt, read_prompts, say_training_inputs
from drafttrain.evaluation.quality import bleu_metric
from drafttrain.evaluation.report import check_report_file
from drafttrain.evaluation.runner import GROUP_BATCHES, RESERVED, decode_by
from drafttrain.models.drafters import read_drafter_settings, read_kind, vocabulary_size
from drafttrain.models.loading import cache_is_deep_enough, check_target

FORCED_VERIFIERS = ("auto", "greedy", "rejection")
"""Verifiers whose acceptance can be computed from the target's plain output."""


class PlannedMethod(NamedTuple):
    """A method, and its name if it is one of `others`."""

    config: DecodeConfig
    other: str | None = None


@dataclass(frozen=True)
class Plan:
    """Checked methods and inputs, and the drafters to load."""

    settings: EvalConfig
    methods: list[PlannedMethod]
    """The drafter's methods, then `others`."""
    rows: Dataset
    rank_rows: Dataset | None
    """Prompts for measuring acceptance by rank, if a tree needs it."""
    drafters: Drafters

    def lines(self) -> list[str]:
        """Returns the lines that a dry run prints."""
        settings, methods = self.settings, [one.config for one in self.methods]
        shown = [one.model_dump_json(exclude_unset=True, exclude={"sampling"}) for one in methods]
        baselines = settings.baselines if settings.mode == "decode" else ()
        return [
            f"target    {settings.target.path} ({settings.target.dtype})",
            f"data      {settings.data.path}: {describe_inputs(self.rows)}",
            *[f"method    {method}" for method in shown],
            *[f"baseline  {name}" for name in baselines],
            f"batches   {', '.join(map(str, settings.batch_sizes))}",
            f"report    {settings.report}",
        ]


def make_plan(settings: EvalConfig, variants: Sequence[DecodeConfig]) -> Plan:
    """Reads the inputs and checks everything except the weights.

    variants: the drafter's methods. Raises ValueError for settings that are incompatible.
    """
    check_report_file(settings.report)
    bleu_metric(settings.bleu_tokenizer)
    methods = [*map(PlannedMethod, variants), *other_methods(settings)]
    if settings.mode == "teacher-forced":
        check_forced(settings, methods)
    rows, rank_rows = load_prompts(settings.data, settings.target), None
    check_batches(settings.batch_sizes, len(rows))
    ranked = [with_ranks(one.config, (1.0,)) for one in methods]
    if settings.rank_data is not None:
        if ranked == [one.config for one in methods]:
            raise ConfigError("rank_data is given, but no sequoia tree lacks tree.by_rank")
        rank_rows = load_prompts(settings.rank_data, settings.target, "rank_data")
    drafters = check_methods(*(one.config for one in methods) if rank_rows is None else ranked)
    if "assisted" in settings.baselines:
        names = sorted({str(one.config.drafter) for one in methods})
        check_assisted(names, check_target(settings.target))
    check_pair(settings.target, *drafters)
    say_training_inputs(str(settings.decode.drafter), rows)
    return Plan(settings, methods, rows, rank_rows, drafters)


def build_methods(plan: Plan, pair: Pair) -> list[Method]:
    """Builds the planned methods; first measures acceptance by rank if a tree needs it."""
    by_rank = None
    if plan.rank_rows is not None:
        sampling, file = plan.settings.decode.sampling, plan.settings.rank_data.path
        prompts, _ = read_prompts(pair, plan.rank_rows)
        by_rank = measure_acceptance_by_rank(pair.model, pair.drafter, sampling, prompts)
        shares = ", ".join(f"{share:.3f}" for share in by_rank)
        print(f"acceptance by rank on {len(prompts)} prompts of {file}: {shares}")
    names = dict(zip(pair.drafters, level_names(list(pair.drafters)), strict=True))
    methods = []
    for config, other in plan.methods:
        method, name = build_method(with_ranks(config, by_rank), pair), str(config.drafter)
        called = None
        if config.cascade is None:  # a cascade's name contains its levels' names
            shape = method.drafter.name.removeprefix(pair.drafters[name].name).strip()
            called = f"{names[name]} {shape}".strip()
        methods.append(replace(method, label=other, other=other, called=called))
    return methods


def other_methods(settings: EvalConfig) -> list[PlannedMethod]:
    """Returns the methods of `others` with the sampling of `decode`. Raises ConfigError for
    reserved names, sampling of their own, and a missing drafter."""
    planned = []
    for name, other in settings.others.items():
        if name.partition(" ")[0] in RESERVED:
            raise ConfigError(
                f"others.{name} has a name that reports keep for plain decoding and baselines "
                f"({', '.join(RESERVED)}); give it another one"
            )
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
        other = other.model_copy(update={"sampling": settings.decode.sampling})
        planned.append(PlannedMethod(other, name))
    return planned


def check_forced(settings: EvalConfig, methods: Sequence[PlannedMethod]) -> None:
    """Raises ConfigError for methods whose acceptance cannot be computed from plain outputs."""
    wrong = ["batch_sizes"] if max(settings.batch_sizes, default=1) > 1 else []
    for method in methods:
        config, name = method.config, str(method.config.drafter)
        kind = read_kind(name)
        tree, stop, verifier = config.tree.kind, config.stop.kind, config.verifier.kind
        longest = read_drafter_settings(name).k if kind.drafts == "blocks" else config.stop.k
        reasons = {
            f"drafter = {name!r}": kind.teacher_forced_probs is None or kind.drafts == "nothing",
            "cascade": config.cascade is not None,
            f"tree.kind = {tree!r}": TREES[tree].shape is not None,
            f"stop.kind = {stop!r}": stop != "fixed",
            f"stop.k = {config.stop.k} (trained for {longest})": config.stop.k > longest,
            f"verifier.kind = {verifier!r}": verifier not in FORCED_VERIFIERS,
        }
        prefix = "" if method.other is None else f"others.{method.other}."
        wrong += [f"{prefix}{reason}" for reason, holds in reasons.items() if holds]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} cannot be measured by mode teacher-forced, which takes chains of fixed "
            f"length with verifier {', '.join(FORCED_VERIFIERS)}; use --mode decode"
        )


def check_batches(batch_sizes: Sequence[int], rows: int) -> None:
    """Raises ConfigError for a batch size larger than the number of inputs."""
    largest = max(batch_sizes, default=1)
    if largest > rows:
        raise ConfigError(
            f"batch_sizes = {largest}, but there are {rows} inputs to decode, so no batch would be "
            f"full; give at least {GROUP_BATCHES * largest} inputs, or smaller batches"
        )


def check_assisted(drafters: Sequence[str], target: PretrainedConfig) -> None:
    """Raises ConfigError if assisted generation is requested without a language model that has the
    target's vocabulary size, or if a decoder is deeper than its encoder (T5)."""
    models = [read_drafter_settings(one) for one in drafters if read_kind(one).is_language_model]
    able = [one for one in models if vocabulary_size(one) == vocabulary_size(target)]
    if not able or not all(map(cache_is_deep_enough, able)):
        raise ConfigError(
            "baselines has 'assisted', which takes language models with the target's vocabulary, "
            "no decoder deeper than its encoder, but drafter = "
            f"{', '.join(map(repr, drafters))}; leave it out, or add such a drafter "
            "(others.NAME.drafter=MODEL)"
        )


def measure_acceptance_by_rank(
    target: CachedModel,
    drafter: GrowingDrafter,
    sampling: SamplingConfig,
    prompts: Sequence[Prompt],
    ranks: int = 16,
) -> tuple[float, ...]:
    """Returns the share of draft rounds in which the target's token has rank 0, 1, ...

    The prompts are decoded with a tree of one level, the drafter's `ranks` most likely tokens; a
    round accepts the one equal to the target's token. Raises ValueError if nothing was drafted.
    """
    ranks = min(ranks, drafter.vocabulary)
    level = Fixed(frozenset((rank,) for rank in range(ranks)), "ranks")
    method = Method(TreeDrafter(drafter, level), FixedLength(1), TargetWalk)
    outputs = decode_by(target, method, sampling, prompts)
    rounds = [played for output in outputs for played in output.rounds if played.drafted]
    if not rounds:
        raise ValueError("no round drafted anything; give longer outputs (max_new_tokens)")
    counts = Counter(node for played in rounds for node in played.path)
    return tuple(counts[rank] / len(rounds) for rank in range(ranks))


def with_ranks(method: DecodeConfig, by_rank: tuple[float, ...] | None) -> DecodeConfig:
    """Sets this acceptance by rank in a method with a Sequoia tree that has none."""
    if by_rank is None or method.tree.kind != "sequoia" or method.tree.by_rank is not None:
        return method
    return method.model_copy(update={"tree": method.tree.model_copy(update={"by_rank": by_rank})})
