"""Load a target with a drafter for it, checked against each other before weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.inputs import TargetConfig
from drafttrain.data.bigrams import read_bigrams
from drafttrain.decoding.engine.architectures import (check_configuration, check_known, check_projection,)
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.types import Drafter
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.drafters import (
    check_drafter,
    check_tokenizers,
    drafts_blocks,
    load_drafter,
)
from drafttrain.models.layout import count_parameters
from drafttrain.models.loading import LoadedTarget, check_target, choose_device, load_target
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.config.runs import MODEL_FREE, PLAIN


@dataclass(frozen=True)
class Pair:
    """A target and a drafter for it, loaded."""

    target: LoadedTarget
    drafter: Drafter
    drafter_model: PreTrainedModel | None
    """None where the drafter is no model."""
    companions: Mapping[str, Drafter] = field(default_factory=dict)
    """More drafters by their path: beside the first one, behind it in a cascade, or instead."""
    models: Mapping[str, PreTrainedModel | None] = field(default_factory=dict)
    """The companions' models."""

    def parameter_ratio(self, beside: Sequence[str] = ()) -> float | None:
        """A drafter's parameters over the target's; None for plain decoding.

        beside: companions that draft side by side with the drafter. The mean over all of them is
        what a call costs: each makes calls of its own.
        """
        if self.drafter_model is None:
            return None
        ratios = [_ratio(self.drafter_model, self.target), *map(self.companion_ratio, beside)]
        return sum(ratios) / len(ratios)

    def companion_ratio(self, name: str) -> float:
        """A companion's parameters over the target's; 0 for max-gram."""
        return _ratio(self.models[name], self.target)

    def led_by(self, drafter: str) -> Pair:
        """The same, with a companion as the first drafter."""
        return replace(self, drafter=self.companions[drafter], drafter_model=self.models[drafter])


def _ratio(model: PreTrainedModel | None, target: LoadedTarget) -> float:
    return 0.0 if model is None else count_parameters(model) / count_parameters(target.model)


def load_pair(
    target: TargetConfig,
    drafter: str,
    companions: Sequence[str] = (),
    trees: bool = False,
    bigrams: str | None = None,
) -> Pair:
    """Target and drafters, checked against each other before the weights of any are read.

    bigrams: the table of max-gram, wherever it drafts. Raises ConfigError for drafters of another
    kind or vocabulary, and ValueError for families that cannot be given trees, where drafts are
    trees.
    """
    settings_of, table = check_pair(target, (drafter, *companions), trees, bigrams)
    loaded = load_target(target)

    def opened(name: str) -> tuple[Drafter, PreTrainedModel | None]:
        if name in MODEL_FREE:
            return NoDrafter() if name == PLAIN else MaxGramDrafter(table), None
        return open_drafter(name, settings_of[name], loaded)

    first, model = opened(drafter)
    others = {name: opened(name) for name in companions}
    return Pair(
        loaded,
        first,
        model,
        {name: other for name, (other, _) in others.items()},
        {name: of_it for name, (_, of_it) in others.items()},
    )


def check_pair(
    target: TargetConfig, drafters: Sequence[str], trees: bool = False, bigrams: str | None = None
) -> tuple[dict[str, PretrainedConfig], list[int] | None]:
    """Settings of the drafters that are models, fit for the target's; max-gram's table.

    Raises as `load_pair`; no weights are read.
    """
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    if trees:
        check_known(target_settings)
    table = None
    if bigrams is not None:
        table = read_bigrams(bigrams, target_settings.get_text_config(decoder=True).vocab_size)
    settings_of = {
        name: _check_settings(name, target, target_settings, trees)
        for name in drafters
        if name not in MODEL_FREE
    }
    return settings_of, table


def open_drafter(
    path: str, settings: PretrainedConfig, target: LoadedTarget
) -> tuple[Drafter, PreTrainedModel]:
    """A drafter of any kind, and its model, from settings that were checked."""
    model = load_drafter(path, settings, target)
    if isinstance(model, SpecDrafter):
        return BlockDrafter(model), model
    if isinstance(model, BlockHeads):
        return BlockHeadsDrafter(model, target.model), model
    return CausalDrafter(CachedModel(model)), model


def _check_settings(
    drafter: str, target: TargetConfig, target_settings: PretrainedConfig, trees: bool
) -> PretrainedConfig:
    settings = check_drafter(drafter, target.path, target_settings)
    if isinstance(settings, BlockHeadsConfig):
        check_projection(target_settings)
    if not drafts_blocks(settings):
        check_configuration(settings)
        check_tokenizers(target, drafter)
        if trees:
            check_known(settings)
    return settings
