"""Building of the hidden cache: training data of acceptance heads, computed once.

The drafter is frozen while heads are trained, so its hidden states at the positions in the loss do
not change; with the cache a whole sweep of heads trains from disk. Shards are divided among the
processes as in distillation: re-running continues with the missing shards and gives the same shards
as an uninterrupted run, with any number of processes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import ceil
from sys import maxsize
from typing import Any, ClassVar

import datasets
import torch
from tqdm import tqdm
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError, counted
from drafttrain.config.commands import CacheConfig
from drafttrain.data.distill.batches import sampling_of
from drafttrain.data.hidden.labels import Labelling, label_outputs
from drafttrain.data.hidden.states import CacheManifest, Labelled, read_states, write_states
from drafttrain.data.shards.outputs import (
    Manifest,
    ShardRow,
    check_some,
    derived_from,
    load_distilled,
)
from drafttrain.data.shards.store import check_folder, fill_folder
from drafttrain.data.shards.writing import join_processes
from drafttrain.decoding.engine.architectures import position_limit, source_limit
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.models.draft_states import check_has_states, state_size
from drafttrain.models.drafters import check_drafter, load_checked_drafter
from drafttrain.models.identity import ModelIdentity, hash_tokenizer, hash_weights
from drafttrain.models.loading import LoadedTarget, check_target, load_target
from drafttrain.models.speech import takes_audio


def build_cache(
    config: CacheConfig,
    target: LoadedTarget | None = None,
    drafter: PreTrainedModel | None = None,
) -> CacheManifest:
    """Writes the missing shards of `config.out` and returns the finished manifest. Runs in every
    process of an `accelerate launch`. Raises ConfigError, before anything is written, as
    `plan_cache` does, for outputs of another target, and for other settings than the folder's."""
    state = join_processes()  # first: it assigns each process its device
    plan_cache(config)
    distilled, outputs = Manifest.read(config.distilled), load_distilled(config.distilled)
    target = load_target(config.target) if target is None else target
    drafter = load_checked_drafter(target, config.drafter) if drafter is None else drafter
    check_own_outputs(config, distilled, target)
    sampling = sampling_of(distilled.settings)  # labels need the outputs' distribution
    labelling = Labelling(
        target=target,
        drafter=drafter,
        processors=CachedModel(target.model).processors(sampling),
        sampling=sampling,
        max_new_tokens=distilled.settings.sampling.max_new_tokens,
        settings=config,
    )
    return fill_folder(Caching(outputs, labelling), config.out, state)


@dataclass(frozen=True)
class Caching:
    """The `Filling` of a hidden cache."""

    outputs: datasets.Dataset
    labelling: Labelling
    kind: ClassVar[type[CacheManifest]] = CacheManifest

    def describe(self) -> CacheManifest:
        settings, drafter = self.labelling.settings, self.labelling.drafter
        sampling = asdict(self.labelling.sampling)
        return CacheManifest(
            **derived_from(self.labelling.target, self.outputs),
            settings=settings,
            drafter=ModelIdentity.of(settings.drafter, drafter),
            hidden_size=state_size(drafter.config, settings.state),
            sampling={k: v for k, v in sampling.items() if v or k != "min_p"},
        )

    def write(self, manifest: CacheManifest, shard: int, work: tqdm) -> None:
        rows = cut_outputs(self.outputs.select(manifest.rows_of(shard)), self.labelling)
        labelled: dict[int, list[Labelled]] = {}
        for mixes in label_outputs(self.labelling, [row for row in rows if row.target_ids]):
            labelled[mixes[0].row] = mixes
            work.update()
        work.update(len(rows) - len(labelled))
        path = manifest.path(self.labelling.settings.out, shard)
        write_states(path, [labelled.get(row.row, []) for row in rows], manifest)

    def complete(self, manifest: CacheManifest) -> dict[str, Any]:
        """Counts the positions. Raises ConfigError for a mix without positions."""
        mixes = read_states(self.labelling.settings.out, manifest)
        labels = torch.cat([shard["acceptance"] for rows in mixes for shard in rows.shards])
        counts = tuple(int(rows.lengths.sum()) for rows in mixes)
        return {"counts": counts, "mean_acceptance": float(labels.mean(dtype=torch.float64))}

    def report(self, manifest: CacheManifest) -> str:
        shards = self.labelling.settings.out.glob("shard-*.safetensors")
        size = sum(path.stat().st_size for path in shards)
        mixes = f" in {manifest.mixes} mixes" if manifest.mixes > 1 else ""
        states = f"{sum(manifest.counts)} {manifest.settings.state} states{mixes}"
        return (
            f"{manifest.rows} rows, {states}, mean acceptance {manifest.mean_acceptance:.3f}, "
            f"{size / 2**20:,.1f} MiB"
        )


def check_own_outputs(config: CacheConfig, distilled: Manifest, target: LoadedTarget) -> None:
    """Raises ConfigError unless the outputs were distilled from this target: labels need that."""
    own, weights = distilled.settings.target, distilled.weights_sha256
    if weights is not None:  # None: a server decoded them, no hash to compare
        weights = hash_weights(target.model, getattr(torch, own.dtype))
    found = weights, hash_tokenizer(target.tokenizer)
    if found != (distilled.weights_sha256, distilled.tokenizer_sha256):
        raise ConfigError(
            f"the outputs in {str(config.distilled)!r} were distilled from {own.path!r}, and "
            f"target {target.path!r} has other weights or another tokenizer; distil from this "
            "target, or give the other one"
        )


def cut_outputs(rows: Iterable[Mapping[str, Any]], labelling: Labelling) -> list[ShardRow]:
    """Truncates outputs to the positions of both models (the last token is an input too); of a
    source that is too long for either of them, nothing is left."""
    configs = labelling.target.model.config, labelling.drafter.config
    longest, positions = (
        min((limit for limit in map(limit_of, configs) if limit is not None), default=maxsize)
        for limit_of in (source_limit, position_limit)
    )
    cut = []
    for row in rows:
        source_ids, target_ids = row["source_ids"], row["target_ids"]
        before = 1 if configs[0].is_encoder_decoder else len(source_ids)
        most = max(0, positions - before) if len(source_ids) <= longest else 0
        cut.append(ShardRow(row["row"], source_ids, target_ids[:most]))
    return cut


def plan_cache(config: CacheConfig) -> str:
    """Checks the settings and returns a line with the cache's rows, positions and disk use. Writes
    nothing and loads no weights. Raises ConfigError for settings that contradict each other,
    missing outputs, and models that do not match."""
    distilled = Manifest.read_finished(config.distilled)
    check_some(config.distilled, distilled)
    target = check_target(config.target)
    settings = check_drafter(config.drafter, config.target, target)
    check_cache(config, settings, target)
    rows, tokens = distilled.counts.ok, distilled.counts.target_tokens
    positions, disk = estimate_cache(config, settings, tokens)
    return (
        f"{rows:,} rows, {tokens:,} output tokens, about {positions * config.mixes:,} "
        f"{config.state} states of {state_size(settings, config.state)} numbers in "
        f"{counted(ceil(rows / config.shard_rows), 'shard')}, about {disk / 2**20:,.1f} MiB on disk"
    )


def estimate_cache(config: CacheConfig, drafter: PretrainedConfig, tokens: int) -> tuple[int, int]:
    """Estimates the positions per mix and the bytes of all mixes from the outputs' tokens."""
    positions = round(tokens * (1 - (config.token_mixing or 0)))
    width = torch.finfo(getattr(torch, config.dtype)).bits // 8
    size = state_size(drafter, config.state)
    return positions, positions * config.mixes * (size * width + 4 + 4)


def check_cache(config: CacheConfig, drafter: PretrainedConfig, target: PretrainedConfig) -> None:
    """Raises ConfigError for models without states or labels, and for folders that cannot be
    used."""
    if takes_audio(target):
        raise ConfigError(
            f"target.path = {config.target.path!r} takes audio, where no stop policy was faster "
            "than a fixed length; acceptance heads are for targets of texts"
        )
    check_has_states(drafter)
    check_folder(config.out)
    if config.out.absolute() == config.distilled.absolute():
        raise ConfigError(
            f"out = {str(config.out)!r} is the folder of the outputs; give one of its own"
        )
