"""Load a target with a drafter for it, checked against each other before weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from drafttrain.config import TargetConfig
from drafttrain.decoding.architectures import check_configuration
from drafttrain.decoding.cached_model import CachedModel
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.spec_drafter import SpecDrafterDrafter
from drafttrain.decoding.types import Drafter
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.drafters import check_drafter, check_tokenizers, load_drafter
from drafttrain.models.loading import LoadedTarget, check_target, choose_device, load_target
from drafttrain.models.spec_drafter import SpecDrafter
from drafttrain.runs import PLAIN


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


def load_pair(target: TargetConfig, drafter: str) -> Pair:
    """Target and drafter, checked against each other before the weights of either are read."""
    choose_device(target.device)
    target_settings = check_target(target)
    check_configuration(target_settings)
    if drafter == PLAIN:
        return Pair(load_target(target), NoDrafter(), None)
    drafter_settings = check_drafter(drafter, target.path, target_settings)
    if not isinstance(drafter_settings, SpecDrafterConfig):
        check_configuration(drafter_settings)
        check_tokenizers(target, drafter)
    loaded = load_target(target)
    model = load_drafter(drafter, drafter_settings, loaded)
    if isinstance(model, SpecDrafter):
        return Pair(loaded, SpecDrafterDrafter(model), model)
    return Pair(loaded, CausalDrafter(CachedModel(model)), model)
