"""Distillation: the target's own outputs for many inputs, as shards that a drafter learns from.

Shards are shared out among processes by number; each process decodes its shards in batches of rows
of like length and writes each shard when it is whole. Re-running continues with the shards that are
missing, and gives the same shards as an uninterrupted run, whatever the number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import numpy
import torch
import transformers
from tqdm import tqdm

from drafttrain.config.base import ConfigError, Interrupted
from drafttrain.config.commands import DistillConfig
from drafttrain.config.relaunch import launch_command
from drafttrain.data.distill.generation import decodes_alone, generate_batch, needs_equal_lengths
from drafttrain.data.distill.plan import (
    DistillPlan,
    check_distill_settings,
    check_distillation,
    check_lengths,
    plan_distillation,
)
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.rows import CHATS
from drafttrain.data.inputs.tokens import check_chats, tokenize_prompts
from drafttrain.data.shards.outputs import (
    TRUNCATED,
    Manifest,
    ShardRow,
    check_same_settings,
    count_rows,
    hash_inputs,
    hash_tokenizer,
    hash_weights,
    load_distilled,
    lost_rows,
    missing_shards,
    read_manifest,
    shard_path,
    write_manifest,
    write_shard,
)
from drafttrain.data.shards.sharing import Share, read_share
from drafttrain.data.shards.writing import join_processes, only_writer, say
from drafttrain.decoding.engine.architectures import position_limit
from drafttrain.decoding.engine.logits_processing import check_generation_config
from drafttrain.decoding.types import Sampling
from drafttrain.models.loading import LoadedTarget, load_target

__all__ = [
    "DistillPlan",
    "Manifest",
    "distill",
    "load_distilled",
    "plan_distillation",
    "read_manifest",
]

ROWS_NAMED = 20
"""Most skipped or failed rows that are printed; the shards name them all."""


def distill(config: DistillConfig, target: LoadedTarget | None = None) -> Manifest:
    """Writes the missing shards of `config.out` (or a share) and returns the manifest, finished
    where all shards are there.

    Runs in every process of an `accelerate launch`. Raises ConfigError, before anything is
    written, for settings that contradict each other, the target or the folder's manifest.
    """
    check_distill_settings(config)
    share = read_share(config.share)
    state = join_processes()  # first: it assigns each process its device
    if target is None:
        inputs = check_distillation(config)
        target = load_target(config.target)
    else:
        inputs = load_inputs(config.data)
    check_lengths(config, target.model.config)
    check_chats(target.tokenizer, inputs, not target.model.config.is_encoder_decoder)
    with ExitStack() as stack:
        if state.is_main_process:
            stack.enter_context(only_writer(config.out, name=share.lock))
            _begin(config, target, inputs, share)
        state.wait_for_everyone()
        manifest = read_manifest(config.out)
        missing = share.of(missing_shards(config.out, manifest))
        state.wait_for_everyone()  # all have listed before anyone writes
        mine = missing[state.process_index :: state.num_processes]
        try:
            _write_shards(mine, config, target, inputs, quiet=not state.is_main_process)
            state.wait_for_everyone()
        except KeyboardInterrupt:
            if state.is_main_process:
                there = manifest.shards - len(missing_shards(config.out, manifest))
                raise Interrupted(
                    f"interrupted: {there} of {manifest.shards} shards are in {config.out}; go on "
                    f"with: {launch_command()}"
                ) from None
            raise
        if state.is_main_process:
            _complete(config.out, manifest)
        state.wait_for_everyone()
    return read_manifest(config.out)


def generate_settings(config: DistillConfig) -> dict[str, Any]:
    """What is asked of `generate`; the rest is as the target's generation_config says."""
    sampled = config.method == "sample"
    sampling = config.sampling
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "max_length": None,
        "num_beams": config.num_beams if config.method == "beam" else 1,
        "do_sample": sampled,
        "temperature": sampling.temperature if sampled else None,
        "top_k": sampling.top_k if sampled else None,
        "top_p": sampling.top_p if sampled else None,
        "num_return_sequences": 1,
        "return_dict_in_generate": False,
        "use_cache": True,
    } | ({} if config.method == "beam" else {"early_stopping": None, "length_penalty": None})


def _begin(
    config: DistillConfig, target: LoadedTarget, inputs: datasets.Dataset, share: Share
) -> None:
    """Compares with what an earlier run has begun here, or begins."""
    wanted = _describe(config, target, inputs)
    try:
        check_generation_config(target.model.generation_config, _sampling(config))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    # listed first: another share may write the manifest and then a shard at this moment
    strangers = sorted(path.name for path in config.out.glob("shard-*.parquet"))
    if (config.out / "manifest.json").is_file():
        manifest = read_manifest(config.out)
        check_same_settings(config.out, manifest, wanted)
        mine = share.of(missing_shards(config.out, manifest))
        share.remove_leftovers(config.out, [shard_path(config.out, i).name for i in mine])
        return
    if strangers:
        raise ConfigError(
            f"{str(config.out)!r} holds {strangers[0]} but no manifest.json; give another folder "
            "with out="
        )
    write_manifest(config.out, wanted)


def _sampling(config: DistillConfig) -> Sampling:
    if config.method != "sample":
        return Sampling()
    return Sampling(config.sampling.temperature, config.sampling.top_k, config.sampling.top_p)


def _describe(config: DistillConfig, target: LoadedTarget, inputs: datasets.Dataset) -> Manifest:
    sampled = config.method == "sample"
    settings = generate_settings(config)
    own = target.model.generation_config.to_dict()
    ignored = settings.keys() | {"transformers_version", "_from_model_config"}
    sampling = config.sampling
    return Manifest(
        target=target.path,
        revision=config.target.revision,
        commit=getattr(target.model.config, "_commit_hash", None),  # set for Hub models only
        weights_sha256=hash_weights(target.model),
        dtype=str(target.model.dtype).removeprefix("torch."),
        tokenizer_sha256=hash_tokenizer(target.tokenizer),
        generation_config={k: v for k, v in own.items() if k not in ignored and v is not None},
        method=config.method,
        num_beams=settings["num_beams"],
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature if sampled else None,
        top_k=sampling.top_k if sampled else None,
        top_p=sampling.top_p if sampled else None,
        seed=sampling.seed if sampled else None,
        batch_tokens=config.batch_tokens,
        shard_rows=config.shard_rows,
        max_source_tokens=config.max_source_tokens,
        data=config.data.model_dump(mode="json"),
        inputs_sha256=hash_inputs(inputs),
        rows=len(inputs),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def _write_shards(
    shards: Sequence[int],
    config: DistillConfig,
    target: LoadedTarget,
    inputs: datasets.Dataset,
    quiet: bool,
) -> None:
    sizes = [min(config.shard_rows, len(inputs) - i * config.shard_rows) for i in shards]
    with tqdm(total=sum(sizes), unit="row", desc="distil", disable=quiet or not shards) as bar:
        tokens, start = 0, time.perf_counter()
        for shard, size in zip(shards, sizes, strict=True):
            first = shard * config.shard_rows
            rows = []
            for done in _decode_rows(inputs.select(range(first, first + size)), config, target):
                rows.extend(done)
                tokens += sum(len(row.target_ids) for row in done)
                rate = tokens / (time.perf_counter() - start)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
                bar.update(len(done))
            write_shard(shard_path(config.out, shard), sorted(rows, key=lambda row: row.row))


def _decode_rows(
    inputs: datasets.Dataset, config: DistillConfig, target: LoadedTarget
) -> Iterator[list[ShardRow]]:
    """Rows of one shard in batches of like length; those that cannot be decoded come first."""
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
    budget = 1 if decodes_alone(model.generation_config) else config.batch_tokens
    for batch in batches_by_length(ready, budget, equal=needs_equal_lengths(model)):
        yield _decode_batch(batch, config, target)


def batches_by_length(
    rows: Sequence[ShardRow], batch_tokens: int, equal: bool = False
) -> Iterator[list[ShardRow]]:
    """Longest first, as many rows as fit: rows x longest row <= batch_tokens, but at least one.

    equal: rows of one length only, so that none is padded.
    """
    ordered = sorted(rows, key=lambda row: (-len(row.source_ids), row.row))
    while ordered:
        longest = len(ordered[0].source_ids)
        fit = max(1, batch_tokens // longest)
        if equal:
            fit = min(fit, sum(len(row.source_ids) == longest for row in ordered[:fit]))
        yield ordered[:fit]
        ordered = ordered[fit:]


def _decode_batch(
    batch: list[ShardRow], config: DistillConfig, target: LoadedTarget
) -> list[ShardRow]:
    """Decodes; where memory does not suffice, in halves. A single row that fails is an error."""
    uniforms = None
    if config.method == "sample":
        uniforms = torch.stack([row_uniforms(config, row.row) for row in batch])
    try:
        outputs = generate_batch(
            target.model, [row.source_ids for row in batch], generate_settings(config), uniforms
        )
    except torch.OutOfMemoryError:
        outputs = None
    if outputs is None:
        if len(batch) == 1:
            reason = "out of memory; use a smaller max_source_tokens or max_new_tokens"
            return [ShardRow(batch[0].row, batch[0].source_ids, status="error", reason=reason)]
        half = len(batch) // 2
        return _decode_batch(batch[:half], config, target) + _decode_batch(
            batch[half:], config, target
        )
    return [
        _finish(row, tokens, config, target) for row, tokens in zip(batch, outputs, strict=True)
    ]


def row_uniforms(config: DistillConfig, row: int) -> torch.Tensor:
    """A row's own random numbers: they depend on the seed and its number alone."""
    generator = numpy.random.default_rng([config.sampling.seed, row])
    return torch.from_numpy(generator.random(config.sampling.max_new_tokens))


def _finish(
    row: ShardRow, tokens: list[int] | None, config: DistillConfig, target: LoadedTarget
) -> ShardRow:
    if tokens is None:
        reason = f"scores are not finite in {target.model.dtype}; try target.dtype=float32"
        return ShardRow(row.row, row.source_ids, status="error", reason=reason)
    generation = target.model.generation_config
    ends = generation.eos_token_id
    ended = tokens[-1] in (ends if isinstance(ends, list) else [ends])
    full = len(tokens) == config.sampling.max_new_tokens
    cut = full and (not ended or generation.forced_eos_token_id is not None)
    return ShardRow(row.row, row.source_ids, tokens, reason=TRUNCATED if cut else "")


def _complete(folder: Path, manifest: Manifest) -> None:
    """Completes the manifest, if no other share's shards are missing."""
    if missing := missing_shards(folder, manifest):
        say(
            f"{folder}: this share is done; {len(missing)} of {manifest.shards} shards are still "
            "missing; the launch of the share that ends last completes the manifest"
        )
        return
    finished = manifest.model_copy(update={"counts": count_rows(folder, manifest)})
    write_manifest(folder, finished)
    _report(folder, finished)


def _report(folder: Path, manifest: Manifest) -> None:
    """The account, and the numbers of the rows that gave no output."""
    counts = manifest.counts
    assert counts is not None
    say(
        f"{folder}: {manifest.rows} rows = {counts.ok} ok + {counts.skipped} skipped + "
        f"{counts.error} failed; {counts.target_tokens} tokens, {counts.truncated} outputs cut at "
        f"max_new_tokens = {manifest.max_new_tokens}"
    )
    lost = lost_rows(folder, manifest)
    for row in lost[:ROWS_NAMED]:
        say(f"  row {row['row']}: {row['status']}, {row['reason']}")
    if len(lost) > ROWS_NAMED:
        say(f"  and {len(lost) - ROWS_NAMED} more: see column `reason` of the shards")
