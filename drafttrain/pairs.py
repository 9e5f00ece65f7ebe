"""Load a target with a drafter for it, checked against each other before weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config import ConfigError, TargetConfig
from drafttrain.data.bigrams import read_bigrams
from drafttrain.decoding.architectures import (
    check_configuration,
    check_known,
    check_projection,
)
from drafttrain.decoding.cached_model import CachedModel
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.spec_drafter import SpecDrafterDrafter
from drafttrain.decoding.types import Drafter
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.drafters import (
    check_drafter,
    check_tokenizers,
    drafts_blocks,
    load_drafter,
)
from drafttrain.models.layout import count_parameters
from drafttrain.models.loading import LoadedTarget, check_target, choose_device, load_target
from drafttrain.models.spec_drafter import SpecDrafter
from drafttrain.runs import MAX_GRAM, PLAIN


@dataclass(frozen=True)
class Pair:
    """A target and a drafter for it, loaded."""

    target: LoadedTarget
    drafter: Drafter
    drafter_model: PreTrainedModel | None
    """None where the drafter is no model."""
    companions: Mapping[str, Drafter] = field(default_factory=dict)
    """More drafters by their path, that draft side by side with it or in a cascade."""
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Of the companions: 0 for max-gram."""

    def parameter_ratio(self, beside: Sequence[str] = ()) -> float | None:
        """A drafter's parameters over the target's; None for plain decoding.

        beside: companions that draft side by side with the drafter. The mean over all of them is
        what a call costs: each makes calls of its own.
        """
        if self.drafter_model is None:
            return None
        sizes = [count_parameters(self.drafter_model), *(self.parameters[name] for name in beside)]
        return sum(sizes) / len(sizes) / count_parameters(self.target.model)

    def companion_ratio(self, name: str) -> float:
        """A companion's parameters over the target's."""
        return self.parameters[name] / count_parameters(self.target.model)


def load_pair(
    target: TargetConfig,
    drafter: str,
    companions: Sequence[str] = (),
    trees: bool = False,
    bigrams: str | None = None,
) -> Pair:
    """Target and drafters, checked against each other before the weights of any are read.

    bigrams: the table of max-gram, wherever it drafts. Raises ConfigError for drafters of another
    kind or vocabulary, for companions that draw no trees where drafts are trees, and ValueError for
    families that cannot be given trees there.
    """
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    if trees:
        check_known(target_settings)
    if drafter == PLAIN:
        return Pair(load_target(target), NoDrafter(), None)
    table = None
    if bigrams is not None:
        table = read_bigrams(bigrams, target_settings.get_text_config(decoder=True).vocab_size)
    settings_of = {
        name: _check_settings(name, target, target_settings, trees)
        for name in (drafter, *companions)
        if name != MAX_GRAM
    }
    if trees:
        for name in companions:
            _check_draws(name, settings_of.get(name))
    loaded = load_target(target)

    def opened(name: str) -> tuple[Drafter, PreTrainedModel | None]:
        if name == MAX_GRAM:
            return MaxGramDrafter(table), None
        return open_drafter(name, settings_of[name], loaded)

    first, model = opened(drafter)
    others = {name: opened(name) for name in companions}
    return Pair(
        loaded,
        first,
        model,
        {name: other for name, (other, _) in others.items()},
        {
            name: 0 if of_it is None else count_parameters(of_it)
            for name, (_, of_it) in others.items()
        },
    )


def open_drafter(
    path: str, settings: PretrainedConfig, target: LoadedTarget
) -> tuple[Drafter, PreTrainedModel]:
    """A drafter of any kind, and its model, from settings that were checked."""
    model = load_drafter(path, settings, target)
    if isinstance(model, SpecDrafter):
        return SpecDrafterDrafter(model), model
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


def _check_draws(drafter: str, settings: PretrainedConfig | None) -> None:
    """Paths of several drafters are drawn by language models."""
    if settings is None or drafts_blocks(settings):
        kinds = {SpecDrafterConfig: "a Spec-Drafter", BlockHeadsConfig: "block heads"}
        kind = MAX_GRAM if settings is None else kinds[type(settings)]
        raise ConfigError(
            f"tree.drafters = {drafter!r} is {kind}; paths of several drafters are drawn by "
            "language models; give one, or use it alone"
        )
