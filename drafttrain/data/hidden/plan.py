"""What a hidden cache will take, and what forbids it, before any weights are loaded."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig
from drafttrain.data.hidden.states import CacheManifest
from drafttrain.data.shards.outputs import Manifest
from drafttrain.data.shards.store import (
    check_folder,
    check_room,
    count_shards,
    count_there,
    read_finished,
    read_share,
)
from drafttrain.models.draft_states import StateKind, state_size, states_of
from drafttrain.models.drafters import check_drafter
from drafttrain.models.loading import check_target

SLOTS_SEEN = 4
"""Slots of a block that are kept, as a guess: up to the first rejection, inclusive."""
PAPER_MIXING = 0.15
"""r of token mixing (SpecDec++, Section 3.2)."""
SPARE = 64 * 2**20
"""Bytes of the disk that a cache leaves free."""


def plan_cache(config: CacheConfig) -> str:
    """A line about rows, positions and disk of a cache; nothing is written, no weights are loaded.

    Raises ConfigError for settings that contradict each other, outputs that are not there, models
    that do not fit together, and a disk that is too small.
    """
    distilled = read_finished(Manifest, config.distilled)
    settings = check_drafter(config.drafter, config.target, check_target(config.target))
    state = check_cache(config, settings)
    rows, tokens = distilled.counts.ok, distilled.counts.target_tokens
    positions, disk = estimate_cache(config, settings, rows, tokens)
    shards = count_shards(rows, config.shard_rows)
    there = count_there(CacheManifest, config.out, shards)
    needed = disk * (shards - there) // max(1, shards) + SPARE
    fewer = "blocks_per_row" if state == "slot" else "distilled rows"
    free = check_room(config.out, needed, "out", f"dtype=float16, fewer mixes or {fewer}")
    return (
        f"{rows:,} rows, {tokens:,} output tokens, about {positions * config.mixes:,} {state} "
        f"states of {state_size(settings, state)} numbers in {shards} shards ({there} there), "
        f"about {disk / 2**20:,.1f} MiB on disk; {free / 2**20:,.0f} MiB are free"
    )


def estimate_cache(
    config: CacheConfig, drafter: PretrainedConfig, rows: int, tokens: int
) -> tuple[int, int]:
    """Positions in each mix, and bytes of all, for outputs of so many rows and tokens."""
    state = state_of(config, drafter)
    if state == "slot":
        blocks = min(tokens, rows * (config.blocks_per_row or tokens))
        positions = blocks * min(slots_of(config, drafter), SLOTS_SEEN)
    else:
        positions = round(tokens * (1 - kept_share(config, state)))
    width = torch.finfo(getattr(torch, config.dtype)).bits // 8
    return positions, positions * config.mixes * (state_size(drafter, state) * width + 4 + 4)


def state_of(config: CacheConfig, drafter: PretrainedConfig) -> StateKind:
    """The kind of states that are cached: as asked, where the drafter has a choice.

    Raises ConfigError for a drafter that has none.
    """
    kinds = states_of(drafter)
    return config.state if config.state in kinds else kinds[0]


def slots_of(config: CacheConfig, drafter: PretrainedConfig) -> int:
    """Slots of a block, of a drafter that drafts blocks."""
    return drafter.k if config.k is None else config.k


def kept_share(config: CacheConfig, state: StateKind) -> float:
    """r of token mixing. Only states at a token's own position depend on what is mixed in."""
    if state != "token":
        return 0.0
    return PAPER_MIXING if config.mixing is None else config.mixing


def check_cache(config: CacheConfig, drafter: PretrainedConfig) -> StateKind:
    """The kind of states that are cached. Raises ConfigError as `state_of`, and for settings that
    contradict each other or count for another kind."""
    state = state_of(config, drafter)
    if config.mixing is not None and state != "token":
        raise ConfigError(
            f"mixing = {config.mixing} counts for token states only, but {state} states are "
            "cached, which see the target's own tokens alone; leave it out, or give state=token"
        )
    if config.mixing == 1.0:
        raise ConfigError(
            "mixing = 1.0 keeps the target's own token everywhere, so that no drafted position is "
            "left to learn from; use mixing=0.15"
        )
    if state != "slot" and config.blocks_per_row is not None:
        raise ConfigError(
            f"blocks_per_row = {config.blocks_per_row} counts for drafters of blocks only, but "
            f"{config.drafter!r} drafts token by token; leave it out"
        )
    read_share(config.share)
    check_folder(config.out)
    if config.out.absolute() == config.distilled.absolute():
        raise ConfigError(
            f"out = {str(config.out)!r} is the folder of the outputs; give one of its own"
        )
    return state
