"""Distillation: decodes inputs with the target and stores the outputs as training data.

Shards are divided among the processes by number. Each process decodes its shards in batches of rows
of similar length with the chosen backend, and writes each shard when it is complete. Re-running
continues with the missing shards and gives the same shards as an uninterrupted run, with any number
of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from time import perf_counter
from typing import Any, ClassVar

import datasets
import pyarrow.compute as compute
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from drafttrain.config.commands import DistillConfig
from drafttrain.config.progress import tracking
from drafttrain.data.distill.batches import BatchDecoder, Decoded, sampling_of
from drafttrain.data.distill.generation import generate_settings
from drafttrain.data.distill.plan import check_distillation
from drafttrain.data.encoded import KeptEncodings
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.clips import AUDIO, DIGESTS, SECONDS, clip_source
from drafttrain.data.inputs.rows import REASON
from drafttrain.data.inputs.tokens import describe_prompts, say_reasons, tokenize_prompts
from drafttrain.data.shards.outputs import (
    TRUNCATED,
    VERSIONS,
    Manifest,
    ShardRow,
    check_some,
    count_rows,
    hash_inputs,
    read_shards,
    write_shard,
)
from drafttrain.data.shards.store import MANIFEST, fill_folder
from drafttrain.data.shards.writing import join_processes, only_writer, say
from drafttrain.decoding.engine.architectures import source_limit
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.logits_processing import check_generation_config
from drafttrain.decoding.engine.speech import detect_languages
from drafttrain.decoding.padding import end_tokens
from drafttrain.decoding.types import NotFinite
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import (
    LoadedTarget,
    load_target,
    outline_target,
    report_generate_defaults,
)

BACKENDS = {
    "transformers": "generation:open_generate",
    "engine": "engine:open_engine",  # the decoding loop of `generate` and `eval`
    "server": "server:open_server",  # a decoder-only target on an OpenAI-compatible server
}
"""Functions (DistillConfig, LoadedTarget) -> BatchDecoder, by the backend's name."""
GROWING = frozenset({"settings.data.limit", "rows", "inputs_sha256"})
"""Manifest fields that change when more inputs are added to a distillation."""
TRIED, TRIED_SHARE, WARMED = 128, 16, 8
"""Number of inputs for the speed comparison of backends: at most TRIED, and at most one in
TRIED_SHARE of all. It is skipped if that is less than WARMED, the number decoded for warm-up."""


def distill(config: DistillConfig, target: LoadedTarget | None = None) -> Manifest:
    """Writes the missing shards of `config.out` and returns the finished manifest.

    Runs in every process of an `accelerate launch`.
    Raises ConfigError, before anything is written, for settings that contradict each other, the
    target or the folder's manifest; and at the end if no row has an output.
    """
    state = join_processes()  # first: it assigns each process its device
    inputs = check_distillation(config)
    if target is None:
        read = load_target if config.decoded_by != "server" else outline_target
        target = read(config.target)
    sampled, beams = config.method == "sample", generate_settings(config)["num_beams"]
    report_generate_defaults(target, config.sampling.temperature * sampled, beams)
    filling = Distilling(config, target, inputs, open_decoder(config, target, inputs, state))
    if state.is_main_process and (config.out / MANIFEST).is_file():
        grow(filling)
    state.wait_for_everyone()
    manifest = fill_folder(filling, config.out, state)
    if state.is_main_process:
        rows = read_shards(config.out, manifest).select(["row", "status", "reason"])
        lost = rows.filter(compute.not_equal(rows["status"], "ok"))
        say_reasons({one["row"]: f"{one['status']}, {one['reason']}" for one in lost.to_pylist()})
    check_some(config.out, manifest)
    return manifest


def open_decoder(
    config: DistillConfig, target: LoadedTarget, inputs: datasets.Dataset, state: PartialState
) -> BatchDecoder:
    """Opens the backend of the settings. For `auto`: the one in the folder's manifest; without a
    manifest, the one that the main process measures to be faster on a sample of the inputs; with
    few inputs, `transformers`."""
    if not config.measures_backend:
        return open_backend(config.decoded_by, config, target)
    chosen = ["transformers"]
    if state.is_main_process and (config.out / MANIFEST).is_file():
        chosen = [Manifest.read(config.out).backend]
    elif state.is_main_process and (count := min(TRIED, len(inputs) // TRIED_SHARE)) >= WARMED:
        tried = inputs.select(range(0, len(inputs), len(inputs) // count)[:count])
        opened = [open_backend("transformers", config, target)]
        with suppress(ValueError):  # the engine does not support this family
            opened.append(open_backend("engine", config, target))
        trials = [Distilling(config, target, tried, decoder) for decoder in opened]
        with tracking(len(trials) * (count + WARMED), "compare backends", "row") as work:
            speeds = {one.decoder.backend: one.rows_per_second(work) for one in trials}
        chosen = [max(speeds, key=speeds.__getitem__)]
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in speeds.items())
        say(f"rows a second on {count} inputs: {rates}; all are decoded by {chosen[0]}")
    broadcast_object_list(chosen)
    return open_backend(chosen[0], config, target)


def open_backend(name: str, config: DistillConfig, target: LoadedTarget) -> BatchDecoder:
    """Opens a backend by name; imports its module only when used. Raises as the backend does."""
    return resolve_name(f"drafttrain.data.distill.{BACKENDS[name]}")(config, target)


def grow(filling: Distilling) -> None:
    """Extends a folder that was begun with only the first of these inputs, as when data.limit is
    raised: its full shards stay. Does nothing if any other setting differs."""
    folder, inputs = filling.config.out, filling.inputs
    there = Manifest.read(folder)
    if there.rows >= len(inputs):
        return
    if hash_inputs(inputs.select(range(there.rows))) != there.inputs_sha256:
        return
    wanted = filling.describe()
    if {name for name, _, _ in there.changed(wanted)} <= GROWING:
        with only_writer(folder):
            if there.rows % there.shard_rows:
                there.path(folder, there.shards - 1).unlink(missing_ok=True)  # it gets more rows
            wanted.write(folder)


@dataclass(frozen=True)
class Distilling:
    """The `Filling` of a distillation."""

    config: DistillConfig
    target: LoadedTarget
    inputs: datasets.Dataset
    decoder: BatchDecoder
    kind: ClassVar[type[Manifest]] = Manifest

    def describe(self) -> Manifest:
        config, target = self.config, self.target
        check_generation_config(target.model.generation_config, sampling_of(config))
        own = target.model.generation_config.to_dict()
        stated = generate_settings(config).keys() | {"transformers_version", "_from_model_config"}
        return Manifest(
            settings=config,
            backend=self.decoder.backend,
            served_model=self.decoder.served_model,
            commit=getattr(target.model.config, "_commit_hash", None),  # set for Hub models only
            weights_sha256=None if config.decoded_by == "server" else hash_weights(target.model),
            tokenizer_sha256=hash_tokenizer(target.tokenizer),
            generation_config={k: v for k, v in own.items() if k not in stated and v is not None},
            inputs_sha256=hash_inputs(self.inputs),
            rows=len(self.inputs),
            versions=VERSIONS,
        )

    def rows_per_second(self, work: tqdm) -> float:
        """Measures the decoding speed on all inputs, after warm-up on the first WARMED."""
        for inputs in (self.inputs.select(range(WARMED)), self.inputs):
            began = perf_counter()
            for done in self.decode(inputs):
                work.update(len(done))
        return len(self.inputs) / (perf_counter() - began)

    def write(self, manifest: Manifest, shard: int, work: tqdm) -> None:
        if shard == 0:
            inputs = describe_prompts(self.target.tokenizer, self.inputs)
            say(f"{self.config.data.path}: {inputs}")
        rows: list[ShardRow] = []
        for done in self.decode(self.inputs.select(manifest.rows_of(shard))):
            rows.extend(done)
            work.update(len(done))
        write_shard(manifest.path(self.config.out, shard), sorted(rows, key=lambda row: row.row))

    def complete(self, manifest: Manifest) -> dict[str, Any]:
        return {"counts": count_rows(read_shards(self.config.out, manifest))}

    def report(self, manifest: Manifest) -> str:
        counts = manifest.counts
        return (
            f"{manifest.rows} rows = {counts.ok} ok + {counts.skipped} skipped + "
            f"{counts.error} failed; {counts.target_tokens} tokens, {counts.truncated} outputs cut "
            f"at max_new_tokens = {self.config.sampling.max_new_tokens}"
        )

    def decode(self, inputs: datasets.Dataset) -> Iterator[list[ShardRow]]:
        """Decodes the inputs; yields the skipped rows first, then finished rows in any order."""
        clips = AUDIO in inputs.column_names
        rows = self._read_clips(inputs) if clips else self._read_texts(inputs)
        yield [row for row in rows if row.status == "skipped"]
        indices = {row.row: index for index, row in enumerate(rows)}
        kept = KeptEncodings(self.config.out, self.target.model) if clips else None
        for batch in self.decoder.batches([row for row in rows if row.status == "ok"]):
            if kept is not None:
                batch = self._encode(batch, [inputs[indices[row.row]] for row in batch], kept)
            yield from self._decode_batch(batch)

    def _read_texts(self, inputs: datasets.Dataset) -> list[ShardRow]:
        """Tokenises texts; rows without tokens, or with too many, are skipped."""
        config, model = self.config, self.target.model
        decoder_only, positions = not model.config.is_encoder_decoder, source_limit(model.config)
        limits = {f"max_source_tokens is {config.max_source_tokens}": config.max_source_tokens}
        if positions is not None and decoder_only:
            new = config.sampling.max_new_tokens
            left = f"{new} new ones leave {positions - new} of the target's {positions} positions"
            limits[left] = positions - new
        elif positions is not None:
            limits[f"the target has {positions} positions"] = positions
        vocabulary = model.get_input_embeddings().num_embeddings
        found = tokenize_prompts(self.target.tokenizer, inputs, decoder_only, limits, vocabulary)
        return [
            ShardRow(row, status="skipped", reason=ids.reason)
            if isinstance(ids, Refused)
            else ShardRow(row, source_ids=ids)
            for row, ids in zip(inputs["row"][:], found, strict=True)
        ]

    def _read_clips(self, inputs: datasets.Dataset) -> list[ShardRow]:
        size = source_limit(self.target.model.config) or 0
        columns = inputs["row"][:], inputs[SECONDS][:], inputs[REASON][:]
        return [
            ShardRow(row, encoded=size, seconds=seconds)
            if reason is None
            else ShardRow(row, status="skipped", reason=reason, seconds=seconds)
            for row, seconds, reason in zip(*columns, strict=True)
        ]

    def _encode(
        self, batch: list[ShardRow], clips: list[dict[str, Any]], kept: KeptEncodings
    ) -> list[ShardRow]:
        """Adds features, encoder states, which are stored as well, and prefixes to clips."""
        model = self.target.model
        sources = [clip_source(self.target, clip) for clip in clips]
        with torch.inference_mode():
            states = Encoder(model)(sources)
        sources, encoded = detect_languages(model, sources, states), []
        for row, clip, source, own in zip(batch, clips, sources, states, strict=True):
            kept.keep(clip[DIGESTS], own)
            prefix = source.prefix[1:].tolist()
            encoded.append(replace(row, source=replace(source, encoded=own), prefix_ids=prefix))
        return encoded

    def _decode_batch(self, batch: list[ShardRow]) -> Iterator[list[ShardRow]]:
        """Decodes a batch and yields its rows as they end; if out of memory, or if logits are not
        finite, decodes the others in halves. A single row that fails is an error row."""
        left = dict(enumerate(batch))
        try:
            for index, tokens in self.decoder.decode(batch):
                yield [self._finish(left.pop(index), tokens)]
        except torch.OutOfMemoryError:
            failed = Refused("out of memory; use a smaller max_source_tokens or max_new_tokens")
        except NotFinite:
            failed = None
        else:
            return
        if len(batch) == 1:  # outside of `except`: the exception keeps memory alive
            yield [self._finish(batch[0], failed)]
            return
        rest = list(left.values())
        half = len(rest) // 2
        for part in (rest[:half], rest[half:]):
            if part:
                yield from self._decode_batch(part)

    def _finish(self, row: ShardRow, tokens: Decoded) -> ShardRow:
        model = self.target.model
        if tokens is None:
            tokens = Refused(f"scores are not finite in {model.dtype}; try target.dtype=float32")
        if isinstance(tokens, Refused):
            return replace(row, status="error", reason=tokens.reason, source=None)
        generation = model.generation_config
        ended = tokens[-1] in end_tokens(generation)
        full = len(tokens) == self.config.sampling.max_new_tokens
        cut = full and (not ended or generation.forced_eos_token_id is not None)
        reason = TRUNCATED if cut else ""
        return replace(row, target_ids=tokens, reason=reason, source=None)
