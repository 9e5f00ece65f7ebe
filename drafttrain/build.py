"""Settings to objects. A new kind of drafter or verifier is one more line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from drafttrain.config import (
    ConfigError,
    DecodeConfig,
    EvalConfig,
    SamplingConfig,
    TargetConfig,
    VerifierConfig,
)
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.spec_drafter import SpecDrafterDrafter
from drafttrain.decoding.sampling import SampledChance
from drafttrain.decoding.types import Chance, Drafter, Sampling, Verifier
from drafttrain.decoding.verifiers import (
    GreedyMatch,
    RejectionSampling,
    SpecVerification,
    check_pairing,
)
from drafttrain.evaluation.runner import EvaluationOptions, Method
from drafttrain.models.loading import LoadedTarget, check_seq2seq, load_target
from drafttrain.models.spec_drafter import SpecDrafter
from drafttrain.runs import PLAIN
from drafttrain.stops import build_stop, varied_settings


@dataclass(frozen=True)
class Pair:
    """A target and a drafter for it, loaded."""

    target: LoadedTarget
    drafter: Drafter
    drafter_model: PreTrainedModel | None
    """None for plain decoding."""

    @property
    def parameter_ratio(self) -> float | None:
        """The drafter's parameters over the target's."""
        if self.drafter_model is None:
            return None
        return self.drafter_model.num_parameters() / self.target.model.num_parameters()


DRAFTERS: dict[str, tuple[type[PreTrainedModel], Callable[[Any], Drafter]]] = {
    "spec-drafter": (SpecDrafter, SpecDrafterDrafter),
}
"""model_type in the drafter's config.json -> its model, and what drafts with it."""

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


def load_pair(target: TargetConfig, drafter: str) -> Pair:
    """Target and drafter, checked against each other before the weights of either are read."""
    target_settings = check_seq2seq(target)
    if drafter == PLAIN:
        return Pair(load_target(target), NoDrafter(), None)
    drafter_settings = read_drafter_settings(drafter)
    check_vocabularies(target.path, target_settings, drafter, drafter_settings)
    loaded = load_target(target)
    model_class, drafter_class = DRAFTERS[drafter_settings.model_type]
    model = model_class.from_pretrained(drafter, dtype=loaded.model.dtype, use_safetensors=True)
    model = model.to(loaded.model.device).eval()
    return Pair(loaded, drafter_class(model), model)


def read_drafter_settings(path: str) -> PretrainedConfig:
    """The drafter's config.json. Raises ConfigError where there is none or it is no drafter's."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"drafter {path!r} holds no config.json; give the final/ folder of a run, or "
            f"{PLAIN!r} for plain decoding"
        )
    if not folder.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise ConfigError(
            f"drafter {path!r}: no such folder; give an existing one, a name on the Hub, or "
            f"{PLAIN!r} for plain decoding"
        )
    try:
        settings = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"drafter {path!r}: its settings cannot be read ({reason})") from error
    if settings.model_type not in DRAFTERS:
        raise ConfigError(
            f"drafter {path!r} is a {settings.model_type!r} model; known drafters: "
            f"{', '.join(DRAFTERS)}, or {PLAIN!r} for plain decoding"
        )
    return settings


def check_vocabularies(
    target_name: str,
    target_settings: PretrainedConfig,
    drafter_name: str,
    drafter_settings: PretrainedConfig,
) -> None:
    """Drafter and target must share one vocabulary. Raises ConfigError with both sizes."""
    drafter_size, target_size = drafter_settings.vocab_size, target_settings.vocab_size
    if drafter_size != target_size:
        raise ConfigError(
            f"drafter {drafter_name!r} has a vocabulary of {drafter_size} tokens but target "
            f"{target_name!r} has {target_size}; train a drafter for this target, or give the "
            "target that the drafter was trained for"
        )
