"""Load a target with a drafter for it, checked against each other before weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config import ConfigError, TargetConfig
from drafttrain.data.bigrams import read_bigrams
from drafttrain.decoding.architectures import check_configuration, check_known
from drafttrain.decoding.cached_model import CachedModel
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.spec_drafter import SpecDrafterDrafter
from drafttrain.decoding.types import Drafter
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.drafters import check_drafter, check_tokenizers, load_drafter
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
    companions: Mapping[str, CausalDrafter] = field(default_factory=dict)
    """More drafters by their path, for drafts of several side by side."""

    def parameter_ratio(self, beside: Sequence[str] = ()) -> float | None:
        """A drafter's parameters over the target's; None for plain decoding.

        beside: companions that draft side by side with the drafter. The mean over all of them is
        what a call costs: each makes calls of its own.
        """
        if self.drafter_model is None:
            return None
        models = [self.drafter_model, *(self.companions[name].model.model for name in beside)]
        sizes = [count_parameters(model) for model in models]
        return sum(sizes) / len(sizes) / count_parameters(self.target.model)


def load_pair(
    target: TargetConfig,
    drafter: str,
    companions: Sequence[str] = (),
    trees: bool = False,
    bigrams: str | None = None,
) -> Pair:
    """Target and drafters, checked against each other before the weights of any are read.

    Raises ConfigError for companions that are no language models, and ValueError for families that
    cannot be given trees, where drafts are trees.
    """
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    if trees:
        check_known(target_settings)
    if drafter == PLAIN:
        return Pair(load_target(target), NoDrafter(), None)
    if drafter == MAX_GRAM:
        vocabulary = target_settings.get_text_config(decoder=True).vocab_size
        table = None if bigrams is None else read_bigrams(bigrams, vocabulary)
        return Pair(load_target(target), MaxGramDrafter(table), None)
    drafter_settings = check_drafter(drafter, target.path, target_settings)
    if not isinstance(drafter_settings, SpecDrafterConfig):
        check_configuration(drafter_settings)
        check_tokenizers(target, drafter)
        if trees:
            check_known(drafter_settings)
    settings_of = {name: _check_companion(name, target, target_settings) for name in companions}
    loaded = load_target(target)
    model = load_drafter(drafter, drafter_settings, loaded)
    others = {
        name: CausalDrafter(CachedModel(load_drafter(name, settings, loaded)))
        for name, settings in settings_of.items()
    }
    if isinstance(model, SpecDrafter):
        return Pair(loaded, SpecDrafterDrafter(model), model, others)
    return Pair(loaded, CausalDrafter(CachedModel(model)), model, others)


def _check_companion(
    drafter: str, target: TargetConfig, target_settings: PretrainedConfig
) -> PretrainedConfig:
    settings = check_drafter(drafter, target.path, target_settings)
    if isinstance(settings, SpecDrafterConfig):
        raise ConfigError(
            f"tree.drafters = {drafter!r} is a Spec-Drafter; paths of several drafters are drawn "
            "by language models; give one, or use it alone"
        )
    check_configuration(settings)
    check_known(settings)
    check_tokenizers(target, drafter)
    return settings
