"""Distillation: the target's own outputs for many inputs, as shards that a drafter learns from.

Shards are shared out among processes by number; each process decodes its shards in batches of rows
of like length, by the backend that is asked for, and writes each shard when it is whole. Re-running
continues with the shards that are missing, and gives the same shards as an uninterrupted run,
whatever the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pkgutil import resolve_name
from typing import ClassVar

import datasets
import pyarrow.compute as compute
import torch
import transformers
from tqdm import tqdm

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import BACKENDS, DistillConfig
from drafttrain.config.decode import SamplingConfig
from drafttrain.data.distill.batches import BatchDecoder, Decoded
from drafttrain.data.distill.generation import generate_settings
from drafttrain.data.encoded import KeptEncodings
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.clips import AUDIO, DIGESTS, SECONDS, hear, name_languages
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import REASON, describe_inputs
from drafttrain.data.inputs.tokens import check_chats, tokenize_prompts
from drafttrain.data.shards.outputs import (
    TRUNCATED,
    Manifest,
    ShardRow,
    check_some,
    count_rows,
    hash_inputs,
    read_shards,
    write_shard,
)
from drafttrain.data.shards.store import MANIFEST, check_folder, fill_folder
from drafttrain.data.shards.writing import join_processes, only_writer, say
from drafttrain.decoding.engine.architectures import position_limit, source_limit
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.logits_processing import check_generation_config
from drafttrain.decoding.types import Sampling
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import (
    LoadedTarget,
    check_target,
    choose_device,
    load_target,
    load_tokenizer,
    outline_target,
    say_how_it_decodes,
)
from drafttrain.models.speech import hears

GROWING = frozenset({"data.limit", "rows", "inputs_sha256"})
"""What differs in a manifest when a distillation takes in more inputs."""
ROWS_NAMED = 20
"""Most skipped or failed rows that are printed; the shards name them all."""
SPOKEN = 4.0
"""Tokens that a second of speech has, about: English, read aloud."""
SAMPLE = 1000
"""Inputs that are tokenised to estimate the tokens of all."""


def distill(config: DistillConfig, target: LoadedTarget | None = None) -> Manifest:
    """Writes the missing shards of `config.out` and returns the finished manifest.

    Runs in every process of an `accelerate launch`.
    Raises ConfigError, before anything is written, for settings that contradict each other, the
    target or the folder's manifest; and at the end where no row has an output.
    """
    state = join_processes()  # first: it assigns each process its device
    inputs = check_distillation(config, target=target)
    if target is None:
        read = load_target if config.decoded_by.reads_weights else outline_target
        target = read(config.target)
    sampled, beams = config.method == "sample", generate_settings(config)["num_beams"]
    say_how_it_decodes(target, config.sampling.temperature * sampled, beams)
    decoder = resolve_name(config.decoded_by.opens)(config, target)
    filling = Distilling(config, target, inputs, decoder)
    if state.is_main_process and (config.out / MANIFEST).is_file():
        grow(filling)
    state.wait_for_everyone()
    manifest = fill_folder(filling, config.out, state)
    check_some(config.out, manifest)
    return manifest


def grow(filling: Distilling) -> None:
    """Let a folder that was begun with the first of these inputs alone take in the others, as when
    data.limit is raised: its full shards stay. Where anything else differs nothing is done."""
    folder, inputs = filling.config.out, filling.inputs
    there = Manifest.read(folder)
    if there.rows >= len(inputs):
        return
    if hash_inputs(inputs.select(range(there.rows))) != there.inputs_sha256:
        return
    wanted = filling.describe()
    old, new = there.settled(), wanted.settled()
    if {name for name in old | new if old.get(name) != new.get(name)} <= GROWING:
        with only_writer(folder):
            if there.rows % there.shard_rows:
                there.path(folder, there.shards - 1).unlink(missing_ok=True)  # it will hold more
            wanted.write(folder)


@dataclass(frozen=True)
class Distilling:
    """A target that answers the inputs of a folder, shard by shard."""

    config: DistillConfig
    target: LoadedTarget
    inputs: datasets.Dataset
    decoder: BatchDecoder
    kind: ClassVar[type[Manifest]] = Manifest

    def describe(self) -> Manifest:
        config, target, settings = self.config, self.target, generate_settings(self.config)
        sampling = config.sampling if config.method == "sample" else SamplingConfig()
        warping = sampling.model_dump(include={"temperature", "top_k", "top_p", "min_p"})
        check_generation_config(target.model.generation_config, Sampling(**warping))
        drawing = warping | {"seed": sampling.seed, "min_p": sampling.min_p or None}
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
            **config.target.model_dump(include={"source_language", "target_language"}),
            **(drawing if config.method == "sample" else dict.fromkeys(drawing)),
            backend=self.decoder.backend,
            **self.decoder.facts,
            **config.model_dump(include={"method", "shard_rows", "max_source_tokens"}),
            data=config.data.model_dump(mode="json"),
            inputs_sha256=hash_inputs(self.inputs),
            rows=len(self.inputs),
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
        )

    def write(self, manifest: Manifest, shard: int, work: tqdm) -> None:
        if shard == 0:
            say(f"{self.config.data.path}: {describe_inputs(self.inputs)}")
        inputs = self.inputs.select(manifest.rows_of(shard))
        rows: list[ShardRow] = []
        decode = self._decode_clips if AUDIO in inputs.column_names else self._decode_texts
        for done in decode(inputs):
            rows.extend(done)
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

    def _decode_texts(self, inputs: datasets.Dataset) -> Iterator[list[ShardRow]]:
        """Rows of one shard in batches of like length; those that cannot be decoded come first."""
        config, model = self.config, self.target.model
        tokenized = tokenize_prompts(
            self.target.tokenizer,
            inputs,
            not model.config.is_encoder_decoder,
            vocabulary=model.get_input_embeddings().num_embeddings,
        )
        positions = position_limit(model.config)
        new = 0 if model.config.is_encoder_decoder else config.sampling.max_new_tokens
        ready, skipped = [], []
        for row, ids in zip(inputs["row"][:], tokenized, strict=True):
            reason = ""
            if isinstance(ids, Refused):
                reason = ids.reason
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
        for batch in self.decoder.batches(ready):
            yield self._decode_batch(batch)

    def _decode_clips(self, inputs: datasets.Dataset) -> Iterator[list[ShardRow]]:
        """Clips of one shard in batches. Features are made a batch at a time, and encoded once."""
        target, encoded = self.target, self.config.encoded
        size = source_limit(target.model.config) or 0
        facts = [*zip(inputs["row"][:], inputs[SECONDS][:], inputs[REASON][:], strict=True)]
        yield [
            ShardRow(row, status="skipped", reason=reason, seconds=seconds)
            for row, seconds, reason in facts
            if reason is not None
        ]
        ready = [ShardRow(n, encoded=size, seconds=long) for n, long, why in facts if why is None]
        places = {row: place for place, (row, _, _) in enumerate(facts)}
        kept = None if encoded is None else KeptEncodings(encoded, target.model)
        for batch in self.decoder.batches(ready):
            clips = [inputs[places[row.row]] for row in batch]
            sources = [hear(target, clip) for clip in clips]
            with torch.inference_mode():
                states = Encoder(target.model)(sources)
            if kept is not None:
                for clip, own in zip(clips, states, strict=True):
                    kept.keep(clip[DIGESTS], own)
            pairs = zip(sources, states, strict=True)
            sources = [replace(source, encoded=own) for source, own in pairs]
            whole = [
                replace(row, source=source, prefix_ids=source.prefix[1:].tolist())
                for row, source in zip(batch, name_languages(target.model, sources), strict=True)
            ]
            yield [replace(row, source=None) for row in self._decode_batch(whole)]

    def _decode_batch(self, batch: list[ShardRow]) -> list[ShardRow]:
        """Decodes, in halves where memory does not suffice; a single row that fails is an error."""
        outputs: Sequence[Decoded] | None = None
        try:
            outputs = self.decoder.decode(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                words = "out of memory; use a smaller max_source_tokens or max_new_tokens"
                outputs = [Refused(words)]
        if outputs is None:  # outside of `except`, which holds on to the memory
            half = len(batch) // 2
            return self._decode_batch(batch[:half]) + self._decode_batch(batch[half:])
        return [self._finish(row, tokens) for row, tokens in zip(batch, outputs, strict=True)]

    def _finish(self, row: ShardRow, tokens: Decoded) -> ShardRow:
        model = self.target.model
        if tokens is None:
            tokens = Refused(f"scores are not finite in {model.dtype}; try target.dtype=float32")
        if isinstance(tokens, Refused):
            return replace(row, status="error", reason=tokens.reason)
        generation = model.generation_config
        ends = generation.eos_token_id
        ended = tokens[-1] in (ends if isinstance(ends, list) else [ends])
        full = len(tokens) == self.config.sampling.max_new_tokens
        cut = full and (not ended or generation.forced_eos_token_id is not None)
        return replace(row, target_ids=tokens, reason=TRUNCATED if cut else "")


@dataclass(frozen=True)
class DistillPlan:
    """What a distillation will take, estimated from a sample of the inputs."""

    rows: int
    source_tokens: int
    target_tokens: int
    """Outputs as long as their inputs, at most max_new_tokens; of decoder-only targets
    max_new_tokens each."""
    disk_bytes: int
    shards: int
    inputs: str
    """Where they are read from, and the first one."""

    def __str__(self) -> str:
        return (
            f"{self.inputs}\n{self.rows:,} rows, about {self.source_tokens:,} source tokens and "
            f"{self.target_tokens:,} generated ones, in {self.shards} shards, "
            f"about {self.disk_bytes / 2**20:,.1f} MiB on disk"
        )


def check_distillation(
    config: DistillConfig, group: str = "data", target: LoadedTarget | None = None
) -> datasets.Dataset:
    """The inputs, once all is checked that can be without the target's weights.

    group: the user's name for the inputs' settings. target: where it is loaded already. Raises
    ConfigError.
    """
    check_distill_settings(config)
    if target is None:
        choose_device(config.target.device)
        model_config, tokenizer = check_target(config.target), load_tokenizer(config.target)
    else:
        model_config, tokenizer = target.model.config, target.tokenizer
    positions, new = position_limit(model_config), config.sampling.max_new_tokens
    prompt = 0 if model_config.is_encoder_decoder else 1
    if positions is not None and new > positions - prompt:
        raise ConfigError(
            f"sampling.max_new_tokens = {new}, but the target has only {positions} positions"
            f"{', prompt included' * prompt}; use sampling.max_new_tokens={positions - prompt} or "
            "less"
        )
    if (config.out / MANIFEST).is_file():
        Manifest.read(config.out)
    inputs = load_inputs(config.data, group, hears(model_config))
    check_chats(tokenizer, inputs, not model_config.is_encoder_decoder)
    return inputs


def plan_distillation(config: DistillConfig) -> DistillPlan:
    """Rows, tokens and disk of a run. Loads the inputs and the tokenizer only."""
    inputs = check_distillation(config)
    model_config, most = check_target(config.target), config.sampling.max_new_tokens
    decoder_only, heard = not model_config.is_encoder_decoder, AUDIO in inputs.column_names
    chosen, lengths = sampled_lengths(config, inputs)
    if heard:
        outputs = [min(round(SPOKEN * seconds), most) for seconds in chosen[SECONDS]]
    else:
        outputs = [most if decoder_only else min(length, most) for length in lengths]
    rows, scale = len(inputs), len(inputs) / len(chosen)
    tokens, new_tokens = round(scale * sum(lengths)), round(scale * sum(outputs))
    read = f"{config.data.path}: {describe_inputs(inputs)}"
    # two bytes a token after zstd; clips are not copied
    disk = 2 * (new_tokens + (0 if heard else tokens)) + 8 * rows
    return DistillPlan(rows, tokens, new_tokens, disk, ceil(rows / config.shard_rows), read)


def sampled_lengths(
    config: DistillConfig, inputs: datasets.Dataset
) -> tuple[datasets.Dataset, list[int]]:
    """Some of the inputs, evenly spaced, and the tokens of each."""
    chosen = inputs.select(range(0, len(inputs), max(1, len(inputs) // SAMPLE)))
    model_config = check_target(config.target)
    if AUDIO in inputs.column_names:
        return chosen, [source_limit(model_config) or 0] * len(chosen)
    tokenizer = load_tokenizer(config.target)
    found = tokenize_prompts(tokenizer, chosen, not model_config.is_encoder_decoder)
    return chosen, [0 if isinstance(ids, Refused) else len(ids) for ids in found]


def check_distill_settings(config: DistillConfig) -> None:
    """Refuse settings that contradict each other, or that the backend cannot follow, before any
    weights are read. Raises ConfigError."""
    backend = config.decoded_by
    check_folder(config.out)
    if config.method not in backend.methods:
        able = [one.name for one in BACKENDS.values() if config.method in one.methods]
        remedy = "leave the drafter out" if config.backend == "auto" else f"backend={able[0]}"
        raise ConfigError(
            f"method = {config.method!r}, but backend {backend.name!r} decodes by "
            f"{' or '.join(backend.methods)} only; use {remedy}, or method={backend.methods[0]}"
        )
    if config.method == "sample" and config.sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0.0 with method = 'sample' would be greedy decoding; "
            "use sampling.temperature=1.0, or method=greedy"
        )
    if backend.checks is not None:
        resolve_name(backend.checks)(config)
