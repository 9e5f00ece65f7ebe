"""The hidden cache: what acceptance heads are trained on, computed once.

The drafter is frozen while heads learn, so its hidden states at the positions in the loss never
change; computing them once lets a whole sweep of heads train from the disk. Shards are shared out
among processes as in distillation: re-running continues with those that are missing, and gives the
same shards as an uninterrupted run, whatever the number of processes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config import CacheConfig, ConfigError
from drafttrain.data.cache_shards import (
    CONTINUE,
    MANIFEST,
    CacheManifest,
    HiddenCache,
    Labelled,
    ModelIdentity,
    check_not_empty,
    check_same_settings,
    missing_shards,
    open_cache,
    read_cache_manifest,
    read_column,
    shard_path,
    write_manifest,
    write_shard,
)
from drafttrain.data.shards import Manifest, load_distilled, read_manifest
from drafttrain.data.slot_blocks import label_slots
from drafttrain.data.token_states import Labelling, Output, label_tokens
from drafttrain.data.writing import join_processes, only_writer, remove_leftovers, say
from drafttrain.decoding.cached_model import CachedModel, make_source
from drafttrain.decoding.types import Sampling
from drafttrain.models.drafter_config import SpecDrafterConfig
from drafttrain.models.drafters import check_drafter, load_drafter_model
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import LoadedTarget, check_target, load_target

__all__ = [
    "CacheManifest",
    "CachePlan",
    "HiddenCache",
    "build_cache",
    "open_cache",
    "plan_cache",
    "read_cache_manifest",
]

SLOTS_SEEN = 4
"""Slots of a block that are kept, as a guess: up to the first rejection, inclusive."""
SPARE = 64 * 2**20
"""Bytes of the disk that a cache leaves free."""


@dataclass(frozen=True)
class CachePlan:
    """What a cache will take, known before any weights are loaded."""

    state: str
    rows: int
    shards: int
    shards_there: int
    """Shards that an earlier run has left."""
    tokens: int
    """Tokens of the outputs."""
    positions: int
    """In all mixes, estimated."""
    hidden_size: int
    disk_bytes: int
    """Of all shards, estimated."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of the shards that are not there yet."""
        return self.disk_bytes * (self.shards - self.shards_there) // max(1, self.shards)

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"{self.rows:,} rows, {self.tokens:,} output tokens, about {self.positions:,} "
            f"{self.state} states of {self.hidden_size} numbers in {self.shards} shards "
            f"({self.shards_there} there), about {self.disk_bytes / mib:,.1f} MiB on disk; "
            f"{self.free_bytes / mib:,.0f} MiB are free"
        )


def plan_cache(config: CacheConfig) -> CachePlan:
    """Rows, positions and disk of a cache; nothing is written and no weights are loaded.

    Raises ConfigError for settings that contradict each other, outputs that are not there, models
    that do not fit together, and a disk that is too small.
    """
    distilled = read_manifest(config.distilled)
    target_settings = check_target(config.target)
    settings = check_drafter(config.drafter, config.target.path, target_settings)
    slots = isinstance(settings, SpecDrafterConfig)
    _check_settings(config, slots)
    rows = len(load_distilled(config.distilled))
    assert distilled.counts is not None
    tokens = distilled.counts.target_tokens
    if slots:
        blocks = min(tokens, rows * (config.blocks_per_row or tokens))
        positions = blocks * min(config.k, SLOTS_SEEN) * config.mixes
    else:
        positions = round(tokens * (1 - config.mixing)) * config.mixes
    width = torch.finfo(getattr(torch, config.dtype)).bits // 8
    shards = -(-rows // config.shard_rows)
    mixes = range(config.mixes)
    existing = next(path for path in (config.out, *config.out.absolute().parents) if path.is_dir())
    plan = CachePlan(
        state="slot" if slots else "token",
        rows=rows,
        shards=shards,
        shards_there=sum(
            all(shard_path(config.out, mix, shard).is_file() for mix in mixes)
            for shard in range(shards)
        ),
        tokens=tokens,
        positions=positions,
        hidden_size=state_size(settings),
        disk_bytes=positions * (state_size(settings) * width + 4 + 8 + 4),
        free_bytes=shutil.disk_usage(existing).free,
    )
    if plan.needed_bytes + SPARE > plan.free_bytes:
        raise ConfigError(
            f"out = {str(config.out)!r}: the cache takes about {plan.needed_bytes / 2**20:,.0f} "
            f"MiB, but {plan.free_bytes / 2**20:,.0f} MiB are free there; use dtype=float16, fewer "
            f"mixes or {'blocks_per_row' if slots else 'distilled rows'}, or another disk"
        )
    return plan


def state_size(settings: PretrainedConfig) -> int:
    """Numbers in a hidden state after the final norm."""
    if isinstance(settings, SpecDrafterConfig):
        return settings.d_model
    text = settings.get_text_config(decoder=True)
    return text.to_dict().get("word_embed_proj_dim") or text.hidden_size  # OPT projects its states


def build_cache(
    config: CacheConfig,
    target: LoadedTarget | None = None,
    drafter: PreTrainedModel | None = None,
) -> CacheManifest:
    """Writes the missing shards of `config.out` and returns the finished manifest.

    Runs in every process of an `accelerate launch`. Raises ConfigError, before anything is
    written, for what `plan_cache` refuses, outputs of another target, and settings other than
    those of the folder's manifest.
    """
    state = join_processes()  # first: it assigns each process its device
    plan = plan_cache(config)
    distilled, outputs = read_manifest(config.distilled), load_distilled(config.distilled)
    if state.is_main_process:
        say(str(plan))
    target = load_target(config.target) if target is None else target
    drafter = load_drafter_model(config.drafter, target) if drafter is None else drafter
    check_same_target(config, distilled, target)
    labelling = _labelling(config, distilled, target, drafter)
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(only_writer(config.out))
            _begin(config, _describe(config, plan, labelling, target, outputs))
        state.wait_for_everyone()
        manifest = read_cache_manifest(config.out)
        missing = missing_shards(config.out, manifest)
        state.wait_for_everyone()  # all have listed before anyone writes
        mine = missing[state.process_index :: state.num_processes]
        try:
            _write_shards(mine, config.out, manifest, labelling, outputs, state.is_main_process)
            state.wait_for_everyone()
        except KeyboardInterrupt:
            if state.is_main_process:
                there = manifest.shards - len(missing_shards(config.out, manifest))
                say(
                    f"interrupted: {there} of {manifest.shards} shards are in {config.out}; "
                    f"{CONTINUE}"
                )
            raise
        if state.is_main_process:
            _finish(config.out, manifest)
        state.wait_for_everyone()
    return read_cache_manifest(config.out)


def _check_settings(config: CacheConfig, slots: bool) -> None:
    if not slots and config.mixing == 1.0:
        raise ConfigError(
            "mixing = 1.0 keeps the target's own token everywhere, so that no drafted position is "
            "left to learn from; use mixing=0.15"
        )
    if not slots and config.blocks_per_row is not None:
        raise ConfigError(
            f"blocks_per_row = {config.blocks_per_row} counts for drafters of blocks only, but "
            f"{config.drafter!r} drafts token by token; leave it out"
        )
    if config.out.exists() and not config.out.is_dir():
        raise ConfigError(f"out = {str(config.out)!r} is a file; give a folder")
    if config.out.absolute() == config.distilled.absolute():
        raise ConfigError(
            f"out = {str(config.out)!r} is the folder of the outputs; give one of its own"
        )


def check_same_target(config: CacheConfig, distilled: Manifest, target: LoadedTarget) -> None:
    """Labels are the target's opinion of its own outputs. Raises ConfigError for another's."""
    own = hash_weights(target.model, getattr(torch, distilled.dtype))
    if own != distilled.weights_sha256:
        raise ConfigError(
            f"the outputs in {str(config.distilled)!r} were distilled from {distilled.target!r} "
            f"(weights {distilled.weights_sha256[:12]}, {distilled.dtype}), not from target "
            f"{target.path!r} (weights {own[:12]}); distil from this target, or give the other one"
        )
    if hash_tokenizer(target.tokenizer) != distilled.tokenizer_sha256:
        raise ConfigError(
            f"the outputs in {str(config.distilled)!r} were distilled with another tokenizer than "
            f"that of target {target.path!r}; distil again"
        )


def _labelling(
    config: CacheConfig, distilled: Manifest, target: LoadedTarget, drafter: PreTrainedModel
) -> Labelling:
    """Models and settings, checked against each other. Raises ConfigError."""
    sampling = cache_sampling(config, distilled)
    slots = isinstance(drafter.config, SpecDrafterConfig)
    if not slots:
        starts = [make_source([0], model).prefix.tolist() for model in (target.model, drafter)]
        if starts[0] != starts[1]:
            raise ConfigError(
                f"the decoder of drafter {config.drafter!r} starts from token {starts[1][0]} but "
                f"that of target {target.path!r} from {starts[0][0]}; set decoder_start_token_id "
                "in the drafter's generation_config"
            )
    try:
        cached = CachedModel(target.model)
        processors = cached.processors(sampling)
        places = [cached.max_positions]
        if not slots:
            places.append(CachedModel(drafter).max_positions)
        elif drafter.config.positions != "relative":
            places.append(drafter.config.max_positions + 1 - config.k)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Labelling(
        target=target.model,
        drafter=drafter,
        processors=processors,
        sampling=sampling,
        max_new_tokens=distilled.max_new_tokens,
        seed=config.seed,
        mixes=config.mixes,
        mixing=config.mixing,
        k=config.k,
        blocks_per_row=config.blocks_per_row,
        batch_tokens=config.batch_tokens,
        places=min((limit for limit in places if limit is not None), default=None),
    )


def cache_sampling(config: CacheConfig, distilled: Manifest) -> Sampling:
    """The warping that labels are made under. Default: as the outputs were decoded."""
    if config.sampling is not None:
        return Sampling(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)
    if distilled.method != "sample":
        return Sampling()
    assert distilled.temperature is not None
    return Sampling(distilled.temperature, distilled.top_k or 0, distilled.top_p or 1.0)


def _begin(config: CacheConfig, wanted: CacheManifest) -> None:
    """Compares with what an earlier run has begun here, or begins."""
    if (config.out / MANIFEST).is_file():
        check_same_settings(config.out, read_cache_manifest(config.out), wanted)
        for folder in (config.out, *config.out.glob("mix-*")):
            remove_leftovers(folder)
        return
    strangers = sorted(path.name for path in config.out.glob("mix-*"))
    if strangers:
        raise ConfigError(
            f"{str(config.out)!r} holds {strangers[0]} but no {MANIFEST}; give another folder "
            "with out="
        )
    write_manifest(config.out, wanted)


def _describe(
    config: CacheConfig,
    plan: CachePlan,
    labelling: Labelling,
    target: LoadedTarget,
    outputs: datasets.Dataset,
) -> CacheManifest:
    slots = plan.state == "slot"
    sampling, drafter = labelling.sampling, labelling.drafter
    return CacheManifest(
        state="slot" if slots else "token",
        target=_identity(target.path, target.model),
        drafter=_identity(config.drafter, drafter),
        hidden_size=plan.hidden_size,
        tokenizer_sha256=hash_tokenizer(target.tokenizer),
        distilled=str(config.distilled),
        outputs_sha256=hash_outputs(outputs),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        mixing=None if slots else config.mixing,
        k=config.k if slots else None,
        blocks_per_row=config.blocks_per_row,
        mixes=config.mixes,
        dtype=config.dtype,
        seed=config.seed,
        batch_tokens=config.batch_tokens,
        shard_rows=config.shard_rows,
        rows=len(outputs),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def _identity(path: str, model: PreTrainedModel) -> ModelIdentity:
    return ModelIdentity(
        path=path, weights_sha256=hash_weights(model), model_type=model.config.model_type
    )


def hash_outputs(outputs: datasets.Dataset) -> str:
    """SHA-256 of the row numbers, sources and outputs, in order."""
    digest = hashlib.sha256()
    for row in outputs:
        digest.update(f"{row['row']}\t{row['source_ids']}\t{row['target_ids']}\n".encode())
    return digest.hexdigest()


def _write_shards(
    shards: Sequence[int],
    folder: Path,
    manifest: CacheManifest,
    labelling: Labelling,
    outputs: datasets.Dataset,
    shown: bool,
) -> None:
    label = label_slots if manifest.state == "slot" else label_tokens
    first = [shard * manifest.shard_rows for shard in shards]
    last = [min(start + manifest.shard_rows, manifest.rows) for start in first]
    total = sum(last) - sum(first)
    with tqdm(total=total, unit="row", desc="cache", disable=not shown or not shards) as bar:
        for shard, start, end in zip(shards, first, last, strict=True):
            rows = [_cut(row, labelling) for row in outputs.select(range(start, end))]
            labelled: list[list[Labelled]] = []
            for mixes in label(labelling, [row for row in rows if row.target_ids]):
                labelled.append(mixes)
                bar.update()
            bar.update(sum(not row.target_ids for row in rows))
            labelled.sort(key=lambda mixes: mixes[0].row)
            for mix in range(manifest.mixes):
                one = [mixes[mix] for mixes in labelled]
                write_shard(shard_path(folder, mix, shard), one, manifest)


def _cut(row: Mapping[str, Any], labelling: Labelling) -> Output:
    """An output, as far as both models have positions for it: its last token is fed as well."""
    source_ids, target_ids, places = row["source_ids"], row["target_ids"], labelling.places
    if places is not None:
        before = 1 if labelling.target.config.is_encoder_decoder else len(source_ids)
        room = places - before if len(source_ids) <= places else 0
        target_ids = target_ids[: max(0, room)]
    return Output(row["row"], source_ids, target_ids)


def _finish(folder: Path, manifest: CacheManifest) -> None:
    """Counts the positions, completes the manifest and prints the account."""
    labels = [
        np.concatenate(read_column(folder, manifest, mix, "acceptance"))
        for mix in range(manifest.mixes)
    ]
    counts = tuple(len(column) for column in labels)
    check_not_empty(folder, counts)
    mean = float(np.concatenate(labels).mean(dtype=np.float64))
    finished = manifest.model_copy(update={"counts": counts, "mean_acceptance": mean})
    write_manifest(folder, finished)
    size = sum(path.stat().st_size for path in folder.glob("mix-*/shard-*.safetensors"))
    mixes = f" in {manifest.mixes} mixes" if manifest.mixes > 1 else ""
    say(
        f"{folder}: {manifest.rows} rows, {sum(counts)} {manifest.state} states{mixes}, mean "
        f"acceptance {mean:.3f}, {size / 2**20:,.1f} MiB"
    )
