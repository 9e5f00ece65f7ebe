"""Stop policies from settings; acceptance heads found, checked against their drafter and loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.decode import STOP_SETTINGS, DecodeConfig, SamplingConfig, StopConfig
from drafttrain.config.base import ConfigError
from drafttrain.config.policy import Policy
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength, Gain, HeadPolicy
from drafttrain.decoding.types import Sampling, StopPolicy
from drafttrain.build.policy import DEFAULT_H, HEAD, POLICY, read_policy
from drafttrain.models.acceptance_head import (
    AcceptanceHead,
    check_head_identity,
    check_head_shape,
    load_heads,
)
from drafttrain.models.drafters import drafts_blocks, load_drafter, read_drafter_settings
from drafttrain.config.runs import MODEL_FREE


@dataclass(frozen=True)
class HeadChoice:
    """An acceptance head, and the policy.json that lies beside it."""

    head: AcceptanceHead
    name: str
    """Where it was found, for messages."""
    policy: Policy | None


def check_stop(decode: DecodeConfig) -> None:
    """Refuse a stop policy that cannot be right, before any large model is loaded.

    Raises ConfigError for settings that another kind of policy goes by, a head that is missing or
    reads other states than the drafter has; ValueError for a policy that would bias sampling.
    """
    check_given(decode.stop)
    if decode.stop.kind != "fixed" and decode.drafter in MODEL_FREE:
        raise ConfigError(
            f"stop.kind = {decode.stop.kind!r}, but drafter {decode.drafter!r} has no rows or "
            "states that it could go by; leave --stop out, or give a trained drafter"
        )
    if decode.stop.kind == "gain" and decode.tree.kind != "opt-tree":
        raise ConfigError(
            "stop.kind = 'gain' goes by the expected acceptance of an opt-tree, but the tree is "
            f"{decode.tree.kind!r}; leave --stop out, or set tree.kind=opt-tree"
        )
    if decode.tree.kind != "none" and decode.stop.kind not in ("fixed", "gain"):
        raise ConfigError(
            f"stop.kind = {decode.stop.kind!r} stops chains, but the drafts are trees "
            f"({decode.tree.kind}); use --stop fixed, or gain with an opt-tree"
        )
    if decode.stop.kind == "head":
        find_head(decode.stop, str(decode.drafter), read_drafter_settings(str(decode.drafter)))
    elif decode.stop.kind == "confidence":
        sampling = decode.sampling
        Confidence(decode.stop.confidence, 1).check_sampling(Sampling(sampling.temperature))


def check_given(config: StopConfig) -> None:
    """Refuse settings that another kind of policy goes by. Raises ConfigError."""
    known = STOP_SETTINGS[config.kind] | {"kind"}
    for name in sorted(config.model_fields_set - known):
        kinds = [kind for kind, used in STOP_SETTINGS.items() if name in used]
        raise ConfigError(
            f"stop.{name} = {getattr(config, name)} counts for stop policy {' or '.join(kinds)} "
            f"only, but it is {config.kind!r}; leave it out, or add --stop {kinds[-1]}"
        )


def build_stop(decode: DecodeConfig, drafter: PreTrainedModel | None) -> StopPolicy:
    """The stop policy that the settings ask for; `drafter` is None for plain decoding.

    Raises ConfigError as `check_stop`, and for a head that was trained for another drafter. A head
    whose labels were made for other sampling is used, with a warning: its stops are as exact.
    """
    check_stop(decode)
    config = decode.stop
    if config.kind == "fixed":
        return FixedLength(config.k)
    assert drafter is not None
    if config.kind == "gain":
        return Gain(config.delta, _max_draft(config, None, drafter.config))
    if config.kind == "entropy":
        return Entropy(config.entropy, _max_draft(config, None, drafter.config))
    if config.kind == "confidence":
        return Confidence(config.confidence, _max_draft(config, None, drafter.config))
    found = open_head(str(decode.drafter), config.head, drafter)
    warn_of_other_sampling(found, decode.sampling)
    policy = found.policy
    h = config.h if config.h is not None else policy.h if policy is not None else None
    return HeadPolicy(
        found.head, DEFAULT_H if h is None else h, _max_draft(config, policy, drafter.config)
    )


def varied_settings(stop: StopPolicy) -> dict[str, float]:
    """The number that a sweep over this kind of policy varies, by its name in StopConfig."""
    if isinstance(stop, FixedLength):
        return {"k": float(stop.k)}
    if isinstance(stop, HeadPolicy):
        return {"h": stop.h}
    if isinstance(stop, Entropy):
        return {"entropy": stop.nats}
    if isinstance(stop, Gain):
        return {"delta": stop.delta}
    assert isinstance(stop, Confidence)
    return {"confidence": stop.threshold}


def find_head(
    config: StopConfig, drafter: str, settings: PretrainedConfig, setting: str = "stop.head"
) -> HeadChoice:
    """The head given, or the one beside the drafter, fit to the shape of the drafter's states.

    setting: what messages call the folder given. Raises ConfigError where there is none, or several
    of which policy.json chooses none.
    """
    folder = Path(drafter) / HEAD if config.head is None else Path(config.head)
    if not folder.is_dir():
        if config.head is None:
            raise ConfigError(
                f"the head policy needs an acceptance head, but drafter {drafter!r} has no {HEAD} "
                "folder beside it; add --head FOLDER"
            )
        raise ConfigError(f"{setting} = {config.head!r}: no such folder; give a head's folder")
    heads = load_heads(folder)
    alone = (folder / "config.json").is_file()
    places = [folder / POLICY, (folder.parent if alone else folder / "final") / POLICY]
    policy = next((read_policy(place) for place in places if place.is_file()), None)
    if len(heads) == 1:
        [name] = heads
    else:
        name = None if policy is None else policy.head
        if name not in heads:
            raise ConfigError(
                f"{setting} = {str(folder)!r} holds {len(heads)} heads ({', '.join(heads)}), and "
                f"no {POLICY} there chooses one; give the folder of one head"
            )
    check_head_shape(heads[name], settings, str(folder))
    if policy is not None and (policy.h is None or policy.head not in (None, HEAD, name)):
        policy = None  # it speaks of something else; h counts even where a fixed length won
    return HeadChoice(heads[name], str(folder) if alone else f"{folder}: {name}", policy)


@lru_cache(maxsize=1)
def open_head(path: str, folder: str | None, drafter: PreTrainedModel) -> HeadChoice:
    """The head on the drafter's device; found and checked once for all thresholds of a sweep."""
    found = find_head(StopConfig(kind="head", head=folder), path, drafter.config)
    try:
        check_head_identity(found.head, drafter, found.name)
    except ConfigError:
        if drafter.dtype == torch.float32:
            raise
        # rounded when it was loaded: its file may hold what the head was trained for
        check_head_identity(found.head, load_drafter(path, drafter.config), found.name)
    found.head.to(drafter.device)
    return found


def _max_draft(config: StopConfig, policy: Policy | None, drafter: PretrainedConfig) -> int:
    """As given, else as the policy says, else as many slots as a block drafter was trained with."""
    if "max_draft" in config.model_fields_set:
        return config.max_draft
    if policy is not None:
        return policy.max_draft
    return drafter.k if drafts_blocks(drafter) else config.max_draft


def warn_of_other_sampling(found: HeadChoice, decoding: SamplingConfig) -> None:
    """Say, once, that a head was trained for another temperature, top-k or top-p."""
    trained = found.head.config.sampling or {}
    names = ("temperature", "top_k", "top_p")
    if any(trained.get(name, getattr(decoding, name)) != getattr(decoding, name) for name in names):
        _warn(
            f"head {found.name!r} was trained for {_in_words(names, trained)} but decoding uses "
            f"{_in_words(names, decoding.model_dump())}; the output is as exact, but the head may "
            "stop too early or too late"
        )


def _in_words(names: Sequence[str], values: dict[str, float]) -> str:
    return ", ".join(f"{name} {values[name]:g}" for name in names if name in values)


@lru_cache
def _warn(message: str) -> None:
    """A line on standard error, once."""
    print(f"warning: {message}", file=sys.stderr)
