"""Finds and loads acceptance heads for decoding and checks them against their drafter."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.policy import HEAD, POLICY, Policy, read_policy
from drafttrain.models.acceptance_head import (
    AcceptanceHead,
    check_head_identity,
    check_head_shape,
    load_heads,
)
from drafttrain.models.drafters import load_drafter
from drafttrain.models.loading import near_folder


@dataclass(frozen=True)
class HeadChoice:
    """An acceptance head with the policy.json that was given or found next to it."""

    head: AcceptanceHead
    name: str
    """The head's folder and, if that has several heads, its name; for messages."""
    file: Path | None
    policy: Policy | None
    """The content of the file; None if there is none."""

    @property
    def threshold(self) -> Policy | None:
        """The policy if it has a threshold h for this head, even if it drafts a fixed length."""
        names, policy = (None, HEAD, self.head.config.name), self.policy
        return policy if policy is not None and policy.h and policy.head in names else None


def find_head(
    given: str | None,
    drafter: str,
    settings: PretrainedConfig,
    setting: str = "stop.head",
    policy_file: Path | None = None,
) -> HeadChoice:
    """Loads the head in the given folder, or that in the drafter's folder, and checks its shape.

    setting: the folder's setting, for messages. Raises ConfigError if there is no head, if several
    and no choice in policy.json, or if it has another shape than the drafter's hidden states.
    """
    folder = Path(drafter) / HEAD if given is None else Path(given)
    if given is not None and not folder.is_dir():
        near = near_folder(folder)
        raise ConfigError(f"{setting} = {given!r}: no such folder; {near}give a head's folder")
    if not folder.is_dir():
        raise ConfigError(
            f"the head policy needs an acceptance head, but drafter {drafter!r} has no folder "
            f"{HEAD}; add --head FOLDER"
        )
    heads = load_heads(folder)
    single = (folder / "config.json").is_file()
    files = [folder / POLICY, (folder.parent if single else folder / "final") / POLICY]
    file = policy_file or next((file for file in files if file.is_file()), None)
    policy = None if file is None else read_policy(file)
    name = next(iter(heads)) if len(heads) == 1 else policy and policy.head
    if name not in heads:
        raise ConfigError(
            f"{setting} = {str(folder)!r} has {len(heads)} heads ({', '.join(heads)}), and no "
            f"{POLICY} chooses one; give the folder of one head, or run `drafttrain tune --write`"
        )
    check_head_shape(heads[name], settings, str(folder))
    where = str(folder) if single else f"{folder}: {name}"
    return HeadChoice(heads[name], where, file, policy)


@lru_cache(maxsize=2)
def open_head(
    path: str, folder: str | None, drafter: PreTrainedModel, decoding: SamplingConfig
) -> HeadChoice:
    """Loads a head to the drafter's device; cached, because a sweep needs it for every threshold.

    Raises ConfigError if it was trained for another drafter; warns if for other sampling.
    """
    choice = find_head(folder, path, drafter.config)
    try:
        check_head_identity(choice.head, drafter, choice.name)
    except ConfigError:
        if drafter.dtype == torch.float32:
            raise
        # the drafter's weights were rounded to its dtype; compare those in its file instead
        check_head_identity(choice.head, load_drafter(path, drafter.config), choice.name)
    choice.head.to(drafter.device)
    trained, used = choice.head.config.sampling or {}, decoding.model_dump()
    warped = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in trained]
    if any(trained[name] != used[name] for name in warped):
        then, now = (", ".join(f"{n} {one[n]:g}" for n in warped) for one in (trained, used))
        print(
            f"warning: head {choice.name!r} was trained for {then} but decoding uses {now}; the "
            "output stays exact, but the head may stop too early or too late",
            file=sys.stderr,
        )
    return choice
