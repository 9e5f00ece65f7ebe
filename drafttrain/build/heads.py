"""Acceptance heads for decoding: found, checked against their drafter, and loaded."""

from __future__ import annotations

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
    """An acceptance head, and the policy.json that was given, or lies next to it."""

    head: AcceptanceHead
    name: str
    """Where it was found, for messages."""
    file: Path | None
    policy: Policy | None
    """The content of the file."""

    @property
    def threshold(self) -> Policy | None:
        """The policy, if it has an h for this head; h counts even where a fixed length won."""
        own, policy = (None, HEAD, self.head.config.name), self.policy
        return policy if policy is not None and policy.h and policy.head in own else None


def find_head(
    given: str | None,
    drafter: str,
    settings: PretrainedConfig,
    setting: str = "stop.head",
    policy_file: Path | None = None,
) -> HeadChoice:
    """The head given, or the one next to the drafter, fit to the shape of the drafter's states.

    setting: what messages call the folder given. Of several heads policy.json names the one. Raises
    ConfigError where there is none, or several of which policy.json names none.
    """
    folder = Path(drafter) / HEAD if given is None else Path(given)
    if not folder.is_dir():
        if given is None:
            raise ConfigError(
                f"the head policy needs an acceptance head, but drafter {drafter!r} has no {HEAD} "
                "folder beside it; add --head FOLDER"
            )
        raise ConfigError(
            f"{setting} = {given!r}: no such folder; {near_folder(folder)}give a head's folder"
        )
    heads = load_heads(folder)
    alone = (folder / "config.json").is_file()
    places = [folder / POLICY, (folder.parent if alone else folder / "final") / POLICY]
    file = policy_file or next((place for place in places if place.is_file()), None)
    policy = None if file is None else read_policy(file)
    name = next(iter(heads)) if len(heads) == 1 else policy and policy.head
    if name not in heads:
        raise ConfigError(
            f"{setting} = {str(folder)!r} holds {len(heads)} heads ({', '.join(heads)}), and no "
            f"{POLICY} there chooses one; give the folder of one head, or run "
            "`drafttrain tune --write`"
        )
    check_head_shape(heads[name], settings, str(folder))
    where = str(folder) if alone else f"{folder}: {name}"
    return HeadChoice(heads[name], where, file, policy)


@lru_cache(maxsize=2)
def open_head(
    path: str, folder: str | None, drafter: PreTrainedModel, decoding: SamplingConfig
) -> HeadChoice:
    """The head on the drafter's device; found and checked once for all thresholds of a sweep. Warns
    where it was trained for another temperature, top-k or top-p."""
    found = find_head(folder, path, drafter.config)
    try:
        check_head_identity(found.head, drafter, found.name)
    except ConfigError:
        if drafter.dtype == torch.float32:
            raise
        # rounded when it was loaded: its file may hold what the head was trained for
        check_head_identity(found.head, load_drafter(path, drafter.config), found.name)
    found.head.to(drafter.device)
    trained, used = found.head.config.sampling or {}, decoding.model_dump()
    warped = [name for name in ("temperature", "top_k", "top_p", "min_p") if name in trained]
    if any(trained[name] != used[name] for name in warped):
        then, now = (
            ", ".join(f"{name} {values[name]:g}" for name in warped) for values in (trained, used)
        )
        print(
            f"warning: head {found.name!r} was trained for {then} but decoding uses {now}; the "
            "output is as exact, but the head may stop too early or too late",
            file=sys.stderr,
        )
    return found
