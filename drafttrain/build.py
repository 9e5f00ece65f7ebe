"""Settings to objects. A new kind of drafter or verifier is one more line here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafttrain.config import (
    ConfigError,
    DecodeConfig,
    EvalConfig,
    SamplingConfig,
    VerifierConfig,
)
from drafttrain.decoding.sampling import SampledChance
from drafttrain.decoding.types import Chance, Sampling, Verifier
from drafttrain.decoding.verifiers import (
    GreedyMatch,
    RejectionSampling,
    SpecVerification,
    check_pairing,
)
from drafttrain.evaluation.runner import EvaluationOptions, Method
from drafttrain.pairs import Pair
from drafttrain.stops import build_stop, check_stop, varied_settings

VERIFIERS: dict[str, Callable[[VerifierConfig], Verifier]] = {
    "greedy": lambda config: GreedyMatch(),
    "spec-verification": lambda config: SpecVerification(config.beta, config.tau),
    "rejection": lambda config: RejectionSampling(),
}


def build_sampling(config: SamplingConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p)


def build_chance(seed: int, device: torch.device | str = "cpu") -> Chance:
    """Random choices that follow from the seed."""
    return SampledChance(torch.Generator(device).manual_seed(seed))


def build_verifier(config: VerifierConfig, sampling: Sampling) -> Verifier:
    """The verifier asked for; `auto` is greedy match at temperature 0, rejection above it.

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
        kind = "greedy" if sampling.greedy else "rejection"
    verifier = VERIFIERS[kind](config)
    verifier.check_sampling(sampling)
    return verifier


def check_method(config: DecodeConfig) -> None:
    """Refuse what can be known to be wrong before any large model is loaded.

    Raises ValueError as `build_verifier` and `check_stop`.
    """
    build_verifier(config.verifier, build_sampling(config.sampling))
    check_stop(config)


def build_method(config: DecodeConfig, pair: Pair) -> Method:
    """Drafter, stop policy and verifier. Raises ValueError for a pairing that is not valid."""
    sampling = build_sampling(config.sampling)
    verifier = build_verifier(config.verifier, sampling)
    stop = build_stop(config, pair.drafter_model)
    check_pairing(pair.drafter, stop, verifier, sampling)
    varied = varied_settings(stop)
    if isinstance(verifier, SpecVerification):
        varied |= {"beta": float(verifier.beta), "tau": verifier.tau}
    return Method(pair.drafter, stop, verifier, pair.parameter_ratio, varied)


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
    )
