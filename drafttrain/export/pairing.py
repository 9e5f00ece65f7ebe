"""Target, drafter and stop policy of `generate`, wrapped once and kept with the target."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from drafttrain.build.drafters import drafter_for
from drafttrain.config.base import ConfigError
from drafttrain.config.policy import Policy
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.export.chosen_policy import Chosen, choose_policy
from drafttrain.models.drafters import load_drafter, read_drafter_settings

KEPT_AS = "_drafttrain_pair"


@dataclass(frozen=True)
class PreparedPair:
    """A target and a drafter ready to decode, and when a round stops."""

    target: CachedModel
    assistant: PreTrainedModel
    drafter: Drafter
    stop: StopPolicy
    rules: Policy
    """As policy.json has them: the verifier counts too."""
    policy: Chosen
    """As the caller gave it."""

    def serves(self, model: PreTrainedModel, assistant: PreTrainedModel, policy: Chosen) -> bool:
        """Whether nothing has changed since: the models, where they are, the policy."""
        return (
            self.target.model is model
            and self.assistant is assistant
            and self.policy == policy
            and self.target.device == model.device
            and not (model.training or assistant.training)
        )


def prepare(model: PreTrainedModel, assistant: PreTrainedModel, policy: Chosen) -> PreparedPair:
    """Check and wrap a pair; the next call with the same pair finds it done.

    It is kept as an attribute of the target, and so freed with it. Raises ValueError for models
    that do not go together, and for a policy or head that cannot be used.
    """
    kept = vars(model).get(KEPT_AS)
    if isinstance(kept, PreparedPair) and kept.serves(model, assistant, policy):
        return kept
    drafter = drafter_for(model, assistant, "assistant_model")
    rules, stop = choose_policy(assistant, policy)
    pair = PreparedPair(CachedModel(model), assistant, drafter, stop, rules, policy)
    setattr(model, KEPT_AS, pair)
    return pair


def load_assistant(model: PreTrainedModel, place: str) -> PreTrainedModel:
    """The drafter of an export, where the call gave none: on the target's device, in its type.

    `place` is where the export was written or pushed to. The next call with the same target finds
    it loaded. Raises ValueError where it is not there (any more).
    """
    kept = vars(model).get(KEPT_AS)
    if (
        isinstance(kept, PreparedPair)
        and kept.assistant.name_or_path == place
        and kept.assistant.device == model.device
        and kept.assistant.dtype == model.dtype
    ):
        return kept.assistant
    try:
        settings = read_drafter_settings(place)
    except ConfigError as error:
        raise ValueError(
            f"assistant_model is missing, and no drafter lies where it was exported to ({error}); "
            "load it from where it lies now, and give assistant_model=drafter"
        ) from None
    return load_drafter(place, settings).to(device=model.device, dtype=model.dtype)
