"""A target's rows at every token of its own outputs, computed once: what drafters learn from.

A target's row is the same in every epoch and for every loss, so a run that reads its likeliest
tokens from the disk calls the target once for each output. Shards are shared out among processes as
in distillation: re-running continues with those that are missing.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import datasets
import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import CausalDrafterRecipe
from drafttrain.data.batches.examples import Example, Examples, TopRows
from drafttrain.data.distill.plan import DistillPlan
from drafttrain.data.distill.recipe_rows import distillations, row_lengths
from drafttrain.data.shards.filling import fill_folder
from drafttrain.data.shards.outputs import hash_outputs
from drafttrain.data.shards.sharing import Share
from drafttrain.data.shards.states import ModelIdentity
from drafttrain.data.shards.store import count_shards, count_there
from drafttrain.data.shards.teacher_rows import (
    TeacherManifest,
    TeacherRows,
    bytes_a_token,
    check_shards,
    open_teacher,
    shard_path,
    write_shard,
)
from drafttrain.data.shards.writing import join_processes, say
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.decoding.sampling import exact_enough, likeliest
from drafttrain.models.loading import LoadedTarget, load_target

SHARD_ROWS = 256
"""Distilled rows of a shard."""


class TaughtExamples(Dataset):
    """`Examples` that hold the target's cached rows along their outputs."""

    def __init__(self, rows: datasets.Dataset, teacher: TeacherRows) -> None:
        self._examples, self._teacher = Examples(rows), teacher

    def __len__(self) -> int:
        return len(self._examples)

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Example]:
        examples = self._examples.__getitems__(keys)
        return [one._replace(target_rows=self._teacher.read(one.row)) for one in examples]


def training_examples(
    settings: CausalDrafterRecipe,
    rows: datasets.Dataset,
    target: LoadedTarget,
    draftable: Tensor | None,
) -> Examples | TaughtExamples:
    """Distilled rows, with the target's rows along them where these are to be cached; made where
    they are missing. Errors as in `cache_teacher`."""
    if settings.teacher.kind == "online":
        return Examples(rows)
    return TaughtExamples(rows, cache_teacher(settings, target, rows, draftable))


def print_teacher(
    settings: CausalDrafterRecipe, target: PretrainedConfig, plan: DistillPlan
) -> None:
    """What the cache would take, where one is asked for; before any weights are loaded."""
    if settings.teacher.kind == "cached":
        vocabulary = target.get_text_config(decoder=True).vocab_size
        found = plan_teacher(settings, vocabulary, plan.rows, plan.target_tokens)
        print(f"teacher      {found}")


def cache_teacher(
    settings: CausalDrafterRecipe,
    target: LoadedTarget,
    rows: datasets.Dataset,
    draftable: Tensor | None,
) -> TeacherRows:
    """The target's rows along these distilled rows' outputs, made where they are missing.

    draftable [C]: as the drafter has it. Runs in every process of an `accelerate launch`. Raises
    ConfigError, before anything is written, for a folder of other settings, another target or other
    rows, and where the disk is too small.
    """
    state, lengths = join_processes(), row_lengths(rows)
    vocabulary = target.model.get_output_embeddings().out_features
    plan = plan_teacher(settings, vocabulary, len(rows), int(lengths[:, 1].sum()))
    if settings.teacher.dtype not in (None, settings.target.dtype):
        faster = settings.target.model_copy(update={"dtype": settings.teacher.dtype})
        target = load_target(faster)
    caching = TeacherCaching(settings, target, rows, lengths, draftable, str(plan))
    fill_folder(caching, plan.folder, Share(), state)
    return open_teacher(plan.folder, lengths[:, 1])


@dataclass(frozen=True)
class TeacherPlan:
    """What a cache takes."""

    folder: Path
    tokens: int
    """Of all outputs."""
    bytes_a_token: int
    shards: int
    shards_there: int
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Of the shards that are not there yet."""
        missing = self.shards - self.shards_there
        return self.tokens * self.bytes_a_token * missing // max(1, self.shards)

    def __str__(self) -> str:
        return (
            f"{self.folder}: the target's rows at about {self.tokens:,} tokens, "
            f"{self.bytes_a_token / 1024:.2f} KB a token, in {self.shards} shards "
            f"({self.shards_there} there); {self.needed_bytes / 2**20:,.1f} MiB to write, "
            f"{self.free_bytes / 2**20:,.0f} MiB are free"
        )


def plan_teacher(
    settings: CausalDrafterRecipe, vocabulary: int, rows: int, tokens: int
) -> TeacherPlan:
    """The disk that outputs of so many rows and tokens take. Raises ConfigError where there is not
    so much."""
    folder = teacher_folder(settings)
    draftable = min(settings.drafter.output_tokens or vocabulary, vocabulary)
    shards = count_shards(rows, SHARD_ROWS)
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    plan = TeacherPlan(
        folder=folder,
        tokens=tokens,
        bytes_a_token=bytes_a_token(min(settings.teacher.top_k, draftable), draftable),
        shards=shards,
        shards_there=count_there([shard_path(folder, shard)] for shard in range(shards)),
        free_bytes=shutil.disk_usage(there).free,
    )
    if plan.needed_bytes > plan.free_bytes:
        raise ConfigError(
            f"teacher.folder = {str(folder)!r}: the target's rows take about "
            f"{plan.needed_bytes / 2**20:,.0f} MiB, but {plan.free_bytes / 2**20:,.0f} MiB are "
            "free there; use a smaller teacher.top_k, fewer rows (data.limit), or another disk"
        )
    return plan


def teacher_folder(settings: CausalDrafterRecipe) -> Path:
    """Where the target's rows lie: as asked, or beside the distilled rows."""
    distilled = distillations(settings)["data"].out
    return settings.teacher.folder or distilled.with_name(f"{distilled.name}-teacher")


@dataclass(frozen=True)
class TeacherCaching:
    """A target that reads its own outputs, shard by shard."""

    settings: CausalDrafterRecipe
    target: LoadedTarget
    outputs: datasets.Dataset
    lengths: np.ndarray
    """[rows, 2] tokens of source and output."""
    draftable: Tensor | None
    plan: str
    kind: ClassVar[type[TeacherManifest]] = TeacherManifest

    @property
    def folder(self) -> Path:
        return teacher_folder(self.settings)

    def describe(self) -> TeacherManifest:
        vocabulary = self.target.model.get_output_embeddings().out_features
        draftable = vocabulary if self.draftable is None else len(self.draftable)
        return TeacherManifest(
            target=ModelIdentity.of(self.target.path, self.target.model),
            distilled=str(distillations(self.settings)["data"].out),
            outputs_sha256=hash_outputs(self.outputs),
            top_k=min(self.settings.teacher.top_k, draftable),
            draftable=draftable,
            draftable_sha256=None if self.draftable is None else hash_tokens(self.draftable),
            shard_rows=SHARD_ROWS,
            rows=len(self.outputs),
            batch_tokens=self.settings.train.batch_tokens,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
        )

    def write(self, manifest: TeacherManifest, shard: int, work: tqdm) -> None:
        found: dict[int, TopRows] = {}
        for batch in self._batches(manifest.rows_of(shard)):
            rows = self.outputs[batch]
            forced = teacher_force(self.target.model, rows["source_ids"], rows["target_ids"])
            for row, one in zip(batch, forced, strict=True):
                found[row] = top_rows(one.logits, manifest.top_k, self.draftable)
            work.update(len(batch))
        outputs = [found[row] for row in manifest.rows_of(shard)]
        write_shard(shard_path(self.folder, shard), outputs)

    def _batches(self, numbers: range) -> Iterator[list[int]]:
        """A shard's rows, those of like length together, in batches of as many tokens as training's
        have."""
        lengths = self.lengths.sum(axis=1)
        batch: list[int] = []
        for row in sorted(numbers, key=lambda number: -lengths[number]):
            if batch and lengths[batch[0]] * (len(batch) + 1) > self.settings.train.batch_tokens:
                yield batch
                batch = []
            batch.append(row)
        yield batch

    def complete(self, manifest: TeacherManifest) -> TeacherManifest:
        """Counts the tokens, and what the likeliest hold of the probability."""
        rows = check_shards(self.folder, manifest, self.lengths[:, 1])
        counted = {"counts": int(self.lengths[:, 1].sum()), "top_k_share": rows.share()}
        return manifest.model_copy(update=counted)

    def report(self, manifest: TeacherManifest) -> None:
        size = sum(path.stat().st_size for path in self.folder.glob(manifest.SHARDS))
        say(
            f"{self.folder}: the target's rows at {manifest.counts:,} tokens of "
            f"{manifest.rows:,} outputs, {size / 2**20:,.1f} MiB; the {manifest.top_k} likeliest "
            f"of {manifest.draftable:,} tokens hold {manifest.top_k_share:.4f} of the probability"
        )


def top_rows(logits: Tensor, top_k: int, draftable: Tensor | None = None) -> TopRows:
    """The likeliest tokens of each row, and what all others have together, where there are any.

    draftable [C]: the tokens that count. Probabilities are those of the whole row in any case.
    Shapes: logits [T, V] -> tokens [T, k], log_probs [T, k] or [T, k + 1], k <= C.
    """
    log_probs = exact_enough(logits).log_softmax(-1)
    if draftable is not None:
        log_probs = log_probs[:, draftable.to(log_probs.device)]
    values, places = likeliest(log_probs, top_k)
    tokens = places if draftable is None else draftable.to(places.device)[places]
    if values.shape[1] < log_probs.shape[1]:
        others = log_probs.scatter(1, places, -torch.inf).logsumexp(-1, keepdim=True)
        values = torch.cat([values, others], dim=1)
    return TopRows(tokens, values)


def hash_tokens(tokens: Tensor) -> str:
    return hashlib.sha256(tokens.cpu().numpy().astype(np.int64).tobytes()).hexdigest()
