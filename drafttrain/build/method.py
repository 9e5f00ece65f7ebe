"""Settings to objects. A new kind of drafter or verifier is one more line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafttrain.build.cascades import build_cascade, cascade_ratios, cascade_stop, check_cascade
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import (DecodeConfig, SamplingConfig, StopConfig, TreeConfig, VerifierConfig,)
from drafttrain.config.commands import EvalConfig
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import Gain
from drafttrain.decoding.trees.verifiers import KSeq, MultiRound, RecursiveRejection, TargetWalk
from drafttrain.decoding.types import Randomness, DrawKind, Sampling, Verifier
from drafttrain.decoding.verifiers import (
    GreedyMatch,
    RejectionSampling,
    SpecVerification,
    check_draw_kind,
    check_pairing,
)
from drafttrain.evaluation.runner import EvaluationOptions, Method
from drafttrain.build.pairs import Pair
from drafttrain.config.runs import MAX_GRAM, MODEL_FREE
from drafttrain.build.stops import build_stop, check_stop, varied_settings
from drafttrain.build.trees import (build_drafter, build_shape, check_companions, check_tree, default_rule, tree_settings, tree_stop,)

CHAINS = TreeConfig()
VERIFIERS: dict[str, Callable[[VerifierConfig], Verifier]] = {
    "greedy": lambda config: GreedyMatch(),
    "spec-verification": lambda config: SpecVerification(config.beta, config.tau),
    "rejection": lambda config: RejectionSampling(),
    "multi-round": lambda config: MultiRound,
    "k-seq": lambda config: KSeq,
    "recursive": lambda config: RecursiveRejection,
    "target-walk": lambda config: TargetWalk,
}


def build_sampling(config: SamplingConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p)


def build_verifier(
    config: VerifierConfig, sampling: Sampling, tree: TreeConfig = CHAINS
) -> Verifier:
    """The verifier asked for; `auto` is greedy match at temperature 0, above it the drafts' rule.

    Raises ConfigError where beta or tau were given to a rule that has none, and ValueError where
    the rule does not fit the sampling.
    """
    kind = config.kind
    given = sorted(config.model_fields_set & {"beta", "tau"})
    if given and kind != "spec-verification":
        raise ConfigError(
            f"{given[0]} = {getattr(config, given[0])} counts for spec-verification only, but the "
            f"verifier is {kind!r}; add --verifier spec-verification"
        )
    if kind == "auto":
        kind = "greedy" if sampling.greedy else default_rule(tree)
    verifier = VERIFIERS[kind](config)
    verifier.check_sampling(sampling)
    return verifier


def check_method(config: DecodeConfig) -> None:
    """Refuse what can be known to be wrong before any large model is loaded.

    Raises ValueError as `build_verifier`, `check_tree`, `check_stop` and `check_draw_kind`.
    """
    sampling = build_sampling(config.sampling)
    verifier = build_verifier(config.verifier, sampling, config.tree)
    check_cascade(config)
    config = config.model_copy(update={"stop": method_stop(config)})
    behind = () if config.cascade is None else config.cascade.drafters
    if config.bigrams is not None and MAX_GRAM not in (config.drafter, *behind):
        raise ConfigError(
            f"bigrams = {config.bigrams!r} counts for drafter {MAX_GRAM!r} only; leave it out"
        )
    check_tree(config)
    check_stop(config)
    if config.tree.kind != "none":
        shape = build_shape(config.tree, config.stop.k)
        draw_kind: DrawKind = "independent" if config.tree.drafters else shape.draw_kind
        check_draw_kind(verifier, draw_kind, True, shape.name)
        check_companions(config.tree)
    elif config.drafter not in MODEL_FREE:
        check_draw_kind(verifier, "deterministic" if sampling.greedy else "iid", False, "chain")


def build_method(config: DecodeConfig, pair: Pair) -> Method:
    """Drafter, stop policy and verifier. Raises ValueError for a pairing that is not valid."""
    sampling = build_sampling(config.sampling)
    verifier = build_verifier(config.verifier, sampling, config.tree)
    config = config.model_copy(update={"stop": method_stop(config)})
    make = build_drafter if config.cascade is None else build_cascade
    drafter, stop = make(config, pair), build_stop(config, pair.drafter_model)
    check_pairing(drafter, stop, verifier, sampling)
    varied = varied_settings(stop)
    if config.tree.kind != "none":
        varied = tree_settings(config.tree, stop.longest)
        if isinstance(stop, Gain):
            varied |= varied_settings(stop)
    if isinstance(verifier, SpecVerification):
        varied |= {"beta": float(verifier.beta), "tau": verifier.tau}
    return Method(drafter, stop, verifier, parameter_ratios(config, pair, drafter.name), varied)


def method_stop(config: DecodeConfig) -> StopConfig:
    """The stop policy asked for, or the one that goes with the drafts."""
    return tree_stop(config) if config.cascade is None else cascade_stop(config)


def parameter_ratios(config: DecodeConfig, pair: Pair, name: str) -> dict[str, float]:
    """Parameters over the target's of each drafter whose calls are counted, by its name."""
    if config.cascade is not None:
        return cascade_ratios(config, pair)
    if config.drafter == MAX_GRAM:
        return {MAX_GRAM: 0.0}
    ratio = pair.parameter_ratio(config.tree.drafters)
    return {} if ratio is None else {name: ratio}


def build_options(config: EvalConfig) -> EvaluationOptions:
    return EvaluationOptions(
        sampling=build_sampling(config.decode.sampling),
        max_new_tokens=config.decode.sampling.max_new_tokens,
        seed=config.decode.sampling.seed,
        baselines=config.baselines,
        num_beams=config.num_beams,
        repeats=config.repeats,
        warmup=config.warmup,
        bootstrap=config.bootstrap,
        bleu_tokenizer=config.bleu_tokenizer,
        compared_by="nodes" if config.budget else "depth" if config.depth else None,
    )
