"""The policy of `generate`: as given, of the drafter's own folder, or a fixed length."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from drafttrain.build.policy import HEAD, POLICY, parse_policy, read_policy
from drafttrain.build.stops import make_stop
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.config.stops import STOPS
from drafttrain.decoding.roles import StopPolicy
from drafttrain.export.parts import DEFAULT_LENGTH
from drafttrain.models.acceptance_head import check_head_identity, check_head_shape, load_heads

Chosen = str | os.PathLike[str] | Mapping[str, Any] | None
"""An export's folder, the content of a policy.json, or nothing."""


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
        rules = Policy(stop="fixed", k=_default_length(assistant))
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


def _default_length(assistant: PreTrainedModel) -> int:
    if kind_of(assistant.config).drafts == "blocks":
        return assistant.config.k
    return assistant.generation_config.num_assistant_tokens or DEFAULT_LENGTH
