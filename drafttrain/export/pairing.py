"""Target, drafter and stop policy of `generate`, wrapped once and kept with the target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from drafttrain.build.drafters import drafter_for
from drafttrain.build.policy import HEAD, POLICY, parse_policy, read_policy
from drafttrain.build.stops import make_stop
from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.config.stops import STOPS
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.export.parts import DEFAULT_LENGTH
from drafttrain.models.acceptance_head import check_head_identity, check_head_shape, load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings

KEPT_AS = "_drafttrain_pair"
Chosen = str | os.PathLike[str] | Mapping[str, Any] | None
"""An export's folder, the content of a policy.json, or nothing."""


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


def choose_policy(assistant: PreTrainedModel, policy: Chosen) -> tuple[Policy, StopPolicy]:
    """The policy given, or of the drafter's own folder, or a fixed length; and its stops.

    A head from another folder than the drafter's must have been trained for it; one from the same
    folder was checked when it was exported. Raises ValueError.
    """
    own = _own_folder(assistant)
    if isinstance(policy, Mapping):
        rules = parse_policy(policy)
        return rules, _open_stop(rules, own, assistant, elsewhere=False)
    folder = own if policy is None else Path(policy)
    if policy is not None and not (folder / POLICY).is_file():
        raise ValueError(f"policy = {str(policy)!r} holds no {POLICY}; give an export's folder")
    if folder is None or not (folder / POLICY).is_file():
        blocks = kind_of(assistant.config).drafts == "blocks"
        asked = None if blocks else assistant.generation_config.num_assistant_tokens
        rules = Policy(stop="fixed", k=assistant.config.k if blocks else asked or DEFAULT_LENGTH)
        return rules, make_stop(rules.stop_config())
    rules = read_policy(folder / POLICY)
    return rules, _open_stop(rules, folder, assistant, elsewhere=policy is not None)


def _open_stop(
    policy: Policy, folder: Path | None, assistant: PreTrainedModel, elsewhere: bool
) -> StopPolicy:
    config = policy.stop_config()
    reads_head = STOPS[policy.stop].reads_head
    if not reads_head or folder is None or not (folder / HEAD).is_dir():
        return make_stop(config)
    [head] = load_heads(folder / HEAD).values()
    check_head_shape(head, assistant.config, str(folder / HEAD))
    if elsewhere:
        check_head_identity(head, assistant, str(folder / HEAD))
    return make_stop(config, head.to(assistant.device))


def _own_folder(assistant: PreTrainedModel) -> Path | None:
    """Where the drafter was loaded from; None for a model that was never on disk."""
    name = assistant.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    commit = assistant.config._commit_hash
    if commit is None:
        raise ValueError(
            f"assistant_model was loaded from {name!r}, which is no longer there; give "
            "policy=FOLDER of an export"
        )
    files = [POLICY, f"{HEAD}/*"]
    return Path(snapshot_download(name, revision=commit, allow_patterns=files))
