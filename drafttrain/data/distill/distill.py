"""Distillation: the target's own outputs for many inputs, as shards that a drafter learns from.

Shards are shared out among processes by number; each process decodes its shards in batches of rows
of like length, by the backend that is asked for, and writes each shard when it is whole. Re-running
continues with the shards that are missing, and gives the same shards as an uninterrupted run,
whatever the number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import ClassVar

import datasets
import pyarrow.compute as compute
import torch
import transformers
from tqdm import tqdm

from drafttrain.config.commands import DistillConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded, Refused
from drafttrain.data.distill.generation import generate_settings
from drafttrain.data.distill.plan import check_distillation
from drafttrain.data.encoded import KeptEncodings
from drafttrain.data.inputs.clips import AUDIO, DIGESTS, SECONDS
from drafttrain.data.inputs.hearing import hear, name_languages
from drafttrain.data.inputs.rows import CHATS
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.data.shards.outputs import (
    TRUNCATED,
    Manifest,
    ShardRow,
    count_rows,
    hash_inputs,
    read_shards,
    write_shard,
)
from drafttrain.data.shards.store import fill_folder, read_share
from drafttrain.data.shards.writing import join_processes, say
from drafttrain.decoding.engine.architectures import position_limit, source_limit
from drafttrain.decoding.engine.encoding import encoder_of
from drafttrain.decoding.engine.logits_processing import check_generation_config
from drafttrain.decoding.types import Sampling
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import LoadedTarget, load_target, outline_target

ROWS_NAMED = 20
"""Most skipped or failed rows that are printed; the shards name them all."""


def distill(config: DistillConfig, target: LoadedTarget | None = None) -> Manifest:
    """Writes the missing shards of `config.out` (or a share) and returns the manifest, finished
    where all shards are there.

    Runs in every process of an `accelerate launch`.
    Raises ConfigError, before anything is written, for settings that contradict each other, the
    target or the folder's manifest.
    """
    state = join_processes()  # first: it assigns each process its device
    inputs = check_distillation(config, target=target)
    if target is None:
        read = load_target if config.decoded_by.reads_weights else outline_target
        target = read(config.target)
    decoder = resolve_name(config.decoded_by.opens)(config, target)
    filling = Distilling(config, target, inputs, decoder)
    return fill_folder(filling, config.out, read_share(config.share), state)


@dataclass
class Distilling:
    """A target that answers the inputs of a folder, shard by shard."""

    config: DistillConfig
    target: LoadedTarget
    inputs: datasets.Dataset
    decoder: BatchDecoder
    kind: ClassVar[type[Manifest]] = Manifest
    plan: ClassVar[str] = ""
    _tokens: int = 0
    _start: float | None = None

    def describe(self) -> Manifest:
        config, target, settings = self.config, self.target, generate_settings(self.config)
        sampling = config.sampling if config.method == "sample" else SamplingConfig()
        warping = sampling.model_dump(include={"temperature", "top_k", "top_p"})
        check_generation_config(target.model.generation_config, Sampling(**warping))
        drawing = warping | {"seed": sampling.seed}
        own = target.model.generation_config.to_dict()
        own_weights = config.decoded_by.reads_weights
        ignored = settings.keys() | {"transformers_version", "_from_model_config"}
        return Manifest(
            target=target.path,
            revision=config.target.revision,
            commit=getattr(target.model.config, "_commit_hash", None),  # set for Hub models only
            weights_sha256=hash_weights(target.model) if own_weights else None,
            dtype=str(target.model.dtype).removeprefix("torch.") if own_weights else None,
            tokenizer_sha256=hash_tokenizer(target.tokenizer),
            generation_config={k: v for k, v in own.items() if k not in ignored and v is not None},
            num_beams=settings["num_beams"],
            max_new_tokens=config.sampling.max_new_tokens,
            **(drawing if config.method == "sample" else dict.fromkeys(drawing)),
            backend=self.decoder.backend,
            **self.decoder.facts,
            **config.model_dump(include={"method", "shard_rows", "max_source_tokens"}),
            data=config.data.model_dump(mode="json"),
            inputs_sha256=hash_inputs(self.inputs),
            rows=len(self.inputs),
            versions={
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                **self.decoder.versions,
            },
        )

    def write(self, manifest: Manifest, shard: int, work: tqdm) -> None:
        if self._start is None:
            self._start = time.perf_counter()
        inputs = self.inputs.select(manifest.rows_of(shard))
        rows: list[ShardRow] = []
        for done in _decode_rows(inputs, self.config, self.target, self.decoder):
            rows.extend(done)
            self._tokens += sum(len(row.target_ids) for row in done)
            rate = self._tokens / (time.perf_counter() - self._start)
            work.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            work.update(len(done))
        write_shard(manifest.path(self.config.out, shard), sorted(rows, key=lambda row: row.row))

    def complete(self, manifest: Manifest) -> Manifest:
        counts = count_rows(read_shards(self.config.out, manifest))
        return manifest.model_copy(update={"counts": counts})

    def report(self, manifest: Manifest) -> None:
        """The account, and the numbers of the rows that gave no output."""
        folder, counts = self.config.out, manifest.counts
        say(
            f"{folder}: {manifest.rows} rows = {counts.ok} ok + {counts.skipped} skipped + "
            f"{counts.error} failed; {counts.target_tokens} tokens, "
            f"{counts.truncated} outputs cut at max_new_tokens = {manifest.max_new_tokens}"
        )
        rows = read_shards(folder, manifest).select(["row", "status", "reason"])
        lost = rows.filter(compute.not_equal(rows["status"], "ok"))
        for row in lost.slice(0, ROWS_NAMED).to_pylist():
            say(f"  row {row['row']}: {row['status']}, {row['reason']}")
        if len(lost) > ROWS_NAMED:
            say(f"  and {len(lost) - ROWS_NAMED} more: see column `reason` of the shards")


def _decode_rows(
    inputs: datasets.Dataset, config: DistillConfig, target: LoadedTarget, decoder: BatchDecoder
) -> Iterator[list[ShardRow]]:
    """Rows of one shard in batches of like length; those that cannot be decoded come first."""
    if AUDIO in inputs.column_names:
        yield from _decode_clips(inputs, config, target, decoder)
        return
    model = target.model
    texts = inputs["source"][:]
    tokenized = tokenize_prompts(target.tokenizer, inputs, not model.config.is_encoder_decoder)
    positions = position_limit(model.config)
    new = 0 if model.config.is_encoder_decoder else config.sampling.max_new_tokens
    chats = CHATS in inputs.column_names
    ready, skipped = [], []
    for row, text, ids in zip(inputs["row"][:], texts, tokenized, strict=True):
        own = text.removeprefix(config.data.prefix).removesuffix(config.data.suffix)
        reason = ""
        if not own.strip() or not ids:
            reason = "no user turn, or one without text" if chats else "empty"
        elif len(ids) > config.max_source_tokens:
            reason = f"{len(ids)} tokens, max_source_tokens is {config.max_source_tokens}"
        elif positions is not None and len(ids) + new > positions:
            more = f" and {new} new ones" if new else ""
            reason = f"{len(ids)} tokens{more}, the target has {positions} positions"
        if reason:
            skipped.append(ShardRow(row, status="skipped", reason=reason))
        else:
            ready.append(ShardRow(row, source_ids=ids))
    yield skipped
    for batch in decoder.batches(ready):
        yield _decode_batch(batch, config, target, decoder)


def _decode_clips(
    inputs: datasets.Dataset, config: DistillConfig, target: LoadedTarget, decoder: BatchDecoder
) -> Iterator[list[ShardRow]]:
    """Clips of one shard in batches. Features are made a batch at a time, and encoded once."""
    size = source_limit(target.model.config) or 0
    lengths = zip(inputs["row"][:], inputs[SECONDS][:], strict=True)
    ready = [ShardRow(row, encoded=size, seconds=seconds) for row, seconds in lengths]
    places = {row.row: place for place, row in enumerate(ready)}
    encode = encoder_of(target.model)
    assert encode is not None
    kept = None if config.encoded is None else KeptEncodings(config.encoded, target.model)
    for batch in decoder.batches(ready):
        clips = [inputs[places[row.row]] for row in batch]
        sources = [hear(target, clip) for clip in clips]
        with torch.inference_mode():
            encoded = encode(sources)
        for place, (clip, own) in enumerate(zip(clips, encoded, strict=True)):
            sources[place] = replace(sources[place], encoded=own)
            if kept is not None:
                kept.keep(clip[DIGESTS], own)
        whole = [
            replace(row, source=source, prefix_ids=source.prefix[1:].tolist())
            for row, source in zip(batch, name_languages(target.model, sources), strict=True)
        ]
        yield [replace(row, source=None) for row in _decode_batch(whole, config, target, decoder)]


def _decode_batch(
    batch: list[ShardRow], config: DistillConfig, target: LoadedTarget, decoder: BatchDecoder
) -> list[ShardRow]:
    """Decodes; where memory does not suffice, in halves. A single row that fails is an error."""
    outputs: Sequence[Decoded] | None = None
    try:
        outputs = decoder.decode(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            outputs = [Refused("out of memory; use a smaller max_source_tokens or max_new_tokens")]
    if outputs is None:  # outside of `except`, which holds on to the memory
        half = len(batch) // 2
        halves = (batch[:half], batch[half:])
        return [row for one in halves for row in _decode_batch(one, config, target, decoder)]
    return [
        _finish(row, tokens, config, target) for row, tokens in zip(batch, outputs, strict=True)
    ]


def _finish(
    row: ShardRow, tokens: Decoded, config: DistillConfig, target: LoadedTarget
) -> ShardRow:
    if tokens is None:
        tokens = Refused(f"scores are not finite in {target.model.dtype}; try target.dtype=float32")
    if isinstance(tokens, Refused):
        return replace(row, status="error", reason=tokens.reason)
    generation = target.model.generation_config
    ends = generation.eos_token_id
    ended = tokens[-1] in (ends if isinstance(ends, list) else [ends])
    full = len(tokens) == config.sampling.max_new_tokens
    cut = full and (not ended or generation.forced_eos_token_id is not None)
    return replace(row, target_ids=tokens, reason=TRUNCATED if cut else "")
