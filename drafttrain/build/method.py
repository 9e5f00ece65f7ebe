"""A method from settings: drafter, stop policy and verifier, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedModel

from drafttrain.build.cascades import (
    build_cascade,
    cascade_ratios,
    cascade_stop,
    check_cascade,
    other_drafters,
)
from drafttrain.build.pairs import Pair
from drafttrain.build.sizes import Sizes, draft_sizes, method_kind
from drafttrain.build.stops import build_stop, check_stop
from drafttrain.build.trees import (
    build_drafter,
    build_shape,
    check_companions,
    check_tree,
    tree_stop,
)
from drafttrain.build.verifiers import build_verifier
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, SamplingConfig, StopConfig
from drafttrain.config.kinds import MAX_GRAM, copies_text
from drafttrain.config.trees import TREES
from drafttrain.decoding.roles import Drafter, StopPolicy, Verifier
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import check_draw_kind
from drafttrain.models.drafters import read_kind


@dataclass(frozen=True)
class Method:
    """A way to decode: drafter, stop policy, verifier."""

    drafter: Drafter
    stop: StopPolicy
    verifier: Verifier
    parameter_ratios: Mapping[str, float] = field(default_factory=dict)
    """Parameters over the target's, by drafter: one, or those whose calls are counted apart. Of
    several that draft side by side, their mean."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """What a sweep varies: k, h, ..., and the settings of the verifier."""
    label: str | None = None
    """A name for reports. Default: those of its three parts."""
    other: str | None = None
    """Which of `others` it is; None: the drafter that is measured."""
    kind: str = "chain"
    """What it is called in reports (`method_kind`)."""
    sizes: Sizes = field(default_factory=dict)
    """How large its drafts are (`draft_sizes`)."""
    assistant: PreTrainedModel | None = None
    """The (first) drafter's model, where it is a language model: Transformers' own assisted
    generation can draft with it."""
    parameters: int | None = None
    """Of all models that draft; None where it is not known."""

    @property
    def name(self) -> str:
        return self.label or f"{self.drafter.name} {self.stop.name} {self.verifier.name}"


def build_sampling(config: SamplingConfig) -> Sampling:
    return Sampling(config.temperature, config.top_k, config.top_p)


def check_method(config: DecodeConfig) -> None:
    """Refuse what can be known to be wrong before any large model is loaded.

    Raises ValueError as `build_verifier`, `check_tree`, `check_stop` and `check_draw_kind`.
    """
    sampling = build_sampling(config.sampling)
    verifier = build_verifier(config.verifier, sampling, config.tree)
    check_cascade(config)
    config = config.model_copy(update={"stop": method_stop(config)})
    behind = () if config.cascade is None else config.cascade.drafters
    if config.bigrams is not None and not any(map(copies_text, (config.drafter, *behind))):
        raise ConfigError(
            f"bigrams = {config.bigrams!r} counts for drafter {MAX_GRAM.name!r} only; leave it out"
        )
    check_tree(config)
    check_stop(config)
    tree = TREES[config.tree.kind]
    if tree.shape is not None:
        draw_kind = "independent" if config.tree.drafters else tree.draw_kind
        check_draw_kind(verifier, draw_kind, True, build_shape(config.tree, config.stop.k).name)
        check_companions(config.tree)
    elif config.drafter is not None:
        kind = read_kind(config.drafter)
        check_draw_kind(verifier, kind.draw_kind(sampling.greedy), False, kind.name)


def build_method(config: DecodeConfig, pair: Pair) -> Method:
    """Drafter, stop policy and verifier; whoever decodes with them checks that they go together.

    Raises ValueError as `build_verifier`, `build_stop` and `build_drafter`.
    """
    sampling = build_sampling(config.sampling)
    verifier = build_verifier(config.verifier, sampling, config.tree)
    config = config.model_copy(update={"stop": method_stop(config)})
    make = build_drafter if config.cascade is None else build_cascade
    drafter, stop = make(config, pair), build_stop(config, pair.drafter_model)
    varied = {stop.rule.varied: float(stop.value)}
    varied |= {name: float(value) for name, value in verifier.settings.items()}
    return Method(
        drafter,
        stop,
        verifier,
        parameter_ratios(config, pair, drafter.name),
        varied,
        kind=method_kind(config),
        sizes=draft_sizes(config, stop),
        assistant=pair.language_model,
        parameters=pair.parameters(other_drafters(config)),
    )


def method_stop(config: DecodeConfig) -> StopConfig:
    """The stop policy asked for, or the one that goes with the drafts."""
    return tree_stop(config) if config.cascade is None else cascade_stop(config)


def parameter_ratios(config: DecodeConfig, pair: Pair, name: str) -> dict[str, float]:
    """Parameters over the target's of each drafter whose calls are counted, by its name."""
    if config.cascade is not None:
        return cascade_ratios(config, pair)
    ratio = pair.parameter_ratio(other_drafters(config))
    return {} if ratio is None else {name: ratio}
