"""Building of the hidden cache: training data of acceptance heads, computed once.

The drafter is frozen while heads are trained, so its hidden states at the positions in the loss do
not change; with the cache a whole sweep of heads trains from disk. Shards are divided among the
processes as in distillation: re-running continues with the missing shards and gives the same shards
as an uninterrupted run, with any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from pkgutil import resolve_name
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig
from drafttrain.config.kinds import STATE_DRAFTER, kind_of
from drafttrain.data.hidden.labels import Labelling, label_slots, label_tokens
from drafttrain.data.hidden.states import CacheManifest, Labelled, read_states, write_states
from drafttrain.data.shards.outputs import (
    Manifest,
    ShardRow,
    check_some,
    derived_from,
    load_distilled,
)
from drafttrain.data.shards.store import check_folder, fill_folder
from drafttrain.data.shards.writing import join_processes, say
from drafttrain.decoding.engine.architectures import position_limit
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Sampling
from drafttrain.models.draft_states import StateKind, state_size, states_of
from drafttrain.models.drafters import check_drafter, load_checked_drafter
from drafttrain.models.identity import ModelIdentity, hash_tokenizer, hash_weights
from drafttrain.models.loading import LoadedTarget, check_target, load_target
from drafttrain.models.speech import takes_audio

SLOTS_SEEN = 4
"""Estimated number of slots kept per block: up to and including the first rejection."""


def build_cache(
    config: CacheConfig,
    target: LoadedTarget | None = None,
    drafter: PreTrainedModel | None = None,
) -> CacheManifest:
    """Writes the missing shards of `config.out` and returns the finished manifest.

    Runs in every process of an `accelerate launch`. Raises ConfigError, before anything is
    written, as `plan_cache` does, for outputs of another target, and for settings that differ from
    the folder's manifest.
    """
    state = join_processes()  # first: it assigns each process its device
    plan_cache(config)
    distilled, outputs = Manifest.read(config.distilled), load_distilled(config.distilled)
    target = load_target(config.target) if target is None else target
    drafter = load_checked_drafter(target, config.drafter) if drafter is None else drafter
    check_own_outputs(config, distilled, target)
    labelling = _labelling(config, distilled, target, drafter)
    caching = Caching(config, target, outputs, labelling)
    return fill_folder(caching, config.out, state)


@dataclass(frozen=True)
class Caching:
    """The `Filling` of a hidden cache: labels the outputs of each shard and stores the states."""

    config: CacheConfig
    target: LoadedTarget
    outputs: datasets.Dataset
    labelling: Labelling
    kind: ClassVar[type[CacheManifest]] = CacheManifest

    def describe(self) -> CacheManifest:
        config, labelling = self.config, self.labelling
        state, drafter = labelling.state, labelling.drafter
        sampling = asdict(labelling.sampling)
        return CacheManifest(
            **derived_from(self.target, self.outputs),
            settings=config,
            state=state,
            drafter=ModelIdentity.of(config.drafter, drafter),
            hidden_size=state_size(drafter.config, state),
            sampling={k: v for k, v in sampling.items() if v or k != "min_p"},
            mixing=labelling.mixing if state == "token" else None,
            k=labelling.settings.k if state == "slot" else None,
        )

    def write(self, manifest: CacheManifest, shard: int, work: tqdm) -> None:
        label = label_slots if manifest.state == "slot" else label_tokens
        rows = [_cut(row, self.labelling) for row in self.outputs.select(manifest.rows_of(shard))]
        labelled: dict[int, list[Labelled]] = {}
        for mixes in label(self.labelling, [row for row in rows if row.target_ids]):
            labelled[mixes[0].row] = mixes
            work.update()
        work.update(len(rows) - len(labelled))
        path = manifest.path(self.config.out, shard)
        write_states(path, [labelled.get(row.row, []) for row in rows], manifest)

    def complete(self, manifest: CacheManifest) -> CacheManifest:
        """Counts the positions. Raises ConfigError for a mix without positions."""
        mixes = read_states(self.config.out, manifest)
        labels = torch.cat([shard["acceptance"] for rows in mixes for shard in rows.shards])
        mean = float(labels.numpy().mean(dtype=np.float64))
        counts = tuple(int(rows.lengths.sum()) for rows in mixes)
        return manifest.model_copy(update={"counts": counts, "mean_acceptance": mean})

    def report(self, manifest: CacheManifest) -> None:
        folder = self.config.out
        size = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
        mixes = f" in {manifest.mixes} mixes" if manifest.mixes > 1 else ""
        say(
            f"{folder}: {manifest.rows} rows, {sum(manifest.counts)} {manifest.state} "
            f"states{mixes}, mean acceptance {manifest.mean_acceptance:.3f}, "
            f"{size / 2**20:,.1f} MiB"
        )


def check_own_outputs(config: CacheConfig, distilled: Manifest, target: LoadedTarget) -> None:
    """Raises ConfigError unless the outputs were distilled from this target: labels need that."""
    weights, tokenizer = distilled.weights_sha256, hash_tokenizer(target.tokenizer)
    if weights is not None:  # None: a server decoded them, no hash to compare
        weights = hash_weights(target.model, getattr(torch, distilled.settings.target.dtype))
    if (weights, tokenizer) != (distilled.weights_sha256, distilled.tokenizer_sha256):
        raise ConfigError(
            f"the outputs in {str(config.distilled)!r} were distilled from "
            f"{distilled.settings.target.path!r}, "
            f"and target {target.path!r} has other weights or another tokenizer; distil from this "
            "target, or give the other one"
        )


def _labelling(
    config: CacheConfig,
    distilled: Manifest,
    target: LoadedTarget,
    drafter: PreTrainedModel,
) -> Labelling:
    """Creates the Labelling. Raises ValueError if decoding would not accept models or settings."""
    state, sampling = state_of(config, drafter.config), Sampling()
    if distilled.settings.method == "sample":  # labels need the outputs' distribution
        drawn = distilled.settings.sampling
        sampling = Sampling(drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p)
    k, slots, limits = config.k, None, [position_limit(target.model.config)]
    if state == "slot":
        k = config.k or drafter.config.k
        if kind_of(drafter.config) is STATE_DRAFTER and k > drafter.config.k:
            most = f"{config.drafter!r} was trained for {drafter.config.k}; give as many or fewer"
            raise ConfigError(f"k = {k} slots, but state drafter {most}")
        slots = resolve_name(kind_of(drafter.config).opens)(drafter, target.model)
        limits.append(None if slots.position_limit is None else slots.position_limit + 1 - k)
    else:
        limits.append(position_limit(drafter.config))
    return Labelling(
        target=target.model,
        drafter=drafter,
        processors=CachedModel(target.model).processors(sampling),
        sampling=sampling,
        max_new_tokens=distilled.settings.sampling.max_new_tokens,
        state=state,
        mixing=config.mixing if state == "token" else 0.0,
        settings=config.model_copy(update={"k": k}),
        places=min((limit for limit in limits if limit is not None), default=None),
        slots=slots,
    )


def _cut(row: Mapping[str, Any], labelling: Labelling) -> ShardRow:
    """Truncates an output to the positions of both models; its last token is fed too."""
    source_ids, target_ids, places = row["source_ids"], row["target_ids"], labelling.places
    if places is not None:
        before = 1 if labelling.target.config.is_encoder_decoder else len(source_ids)
        room = places - before if len(source_ids) <= places else 0
        target_ids = target_ids[: max(0, room)]
    return ShardRow(row["row"], source_ids, target_ids)


def plan_cache(config: CacheConfig) -> str:
    """Checks the settings and returns a line with the cache's rows, positions and disk use.

    Writes nothing and loads no weights. Raises ConfigError for settings that contradict each other,
    missing outputs, and models that do not match.
    """
    distilled = Manifest.read_finished(config.distilled)
    check_some(config.distilled, distilled)
    target = check_target(config.target)
    settings = check_drafter(config.drafter, config.target, target)
    state = check_cache(config, settings, target)
    rows, tokens = distilled.counts.ok, distilled.counts.target_tokens
    positions, disk = estimate_cache(config, settings, rows, tokens)
    return (
        f"{rows:,} rows, {tokens:,} output tokens, about {positions * config.mixes:,} {state} "
        f"states of {state_size(settings, state)} numbers in "
        f"{ceil(rows / config.shard_rows)} shards, about {disk / 2**20:,.1f} MiB on disk"
    )


def estimate_cache(
    config: CacheConfig, drafter: PretrainedConfig, rows: int, tokens: int
) -> tuple[int, int]:
    """Estimates the positions per mix and the bytes of all mixes from the outputs' size."""
    state = state_of(config, drafter)
    if state == "slot":
        blocks = min(tokens, rows * (config.blocks_per_row or tokens))
        positions = blocks * min(config.k or drafter.k, SLOTS_SEEN)
    else:
        positions = round(tokens * (1 - config.mixing if state == "token" else 1))
    width = torch.finfo(getattr(torch, config.dtype)).bits // 8
    return positions, positions * config.mixes * (state_size(drafter, state) * width + 4 + 4)


def state_of(config: CacheConfig, drafter: PretrainedConfig) -> StateKind:
    """Returns the kind of states to cache: config.state if the drafter has it, else its first kind.

    Raises ConfigError for a drafter without states.
    """
    kinds = states_of(drafter)
    return config.state if config.state in kinds else kinds[0]


def check_cache(
    config: CacheConfig, drafter: PretrainedConfig, target: PretrainedConfig
) -> StateKind:
    """Returns the kind of states to cache. Raises ConfigError as `state_of` does, and for settings
    that contradict each other or apply only to another kind."""
    if takes_audio(target):
        raise ConfigError(
            f"target.path = {config.target.path!r} takes audio, where no stop policy was faster "
            "than a fixed length; acceptance heads are for targets of texts"
        )
    state = state_of(config, drafter)
    if config.state == "token" and state == "slot":
        raise ConfigError(
            f"state = 'token' counts for drafters of tokens only, but {config.drafter!r} drafts "
            "blocks; leave it out"
        )
    for name in ("blocks_per_row", "k"):
        if (value := getattr(config, name)) is not None and state != "slot":
            raise ConfigError(
                f"{name} = {value} counts for drafters of blocks only, but {config.drafter!r} "
                "drafts token by token; leave it out"
            )
    check_folder(config.out)
    if config.out.absolute() == config.distilled.absolute():
        raise ConfigError(
            f"out = {str(config.out)!r} is the folder of the outputs; give one of its own"
        )
    return state
