"""Cache of the target's likeliest tokens at every token of its outputs.

With the cache, a run calls the target once per output instead of in every epoch. A shard has
`tokens` [N, k], int32, the likeliest first, and `log_probs` [N, k], float32, or [N, k + 1] if there
are more than k tokens: the last column is the log-probability of all other tokens together.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.data.batches.examples import Example, Examples, TopRows, merged_rows
from drafttrain.data.distill.batches import batches_by_length
from drafttrain.data.distill.recipe_rows import distillations
from drafttrain.data.shards.outputs import DerivedManifest, ShardRow, derived_from
from drafttrain.data.shards.store import fill_folder, open_tensors, write_tensors
from drafttrain.data.shards.writing import join_processes
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.decoding.sampling import at_least_float32, likeliest
from drafttrain.models.loading import LoadedTarget

SHARD_ROWS = 256
"""Number of distilled rows per shard."""


class TeacherManifest(DerivedManifest):
    """Manifest of a cache of the likeliest tokens."""

    COMMAND: ClassVar[str] = "recipes/train_causal_drafter.py"
    SETTING: ClassVar[str] = "distilled"
    MAY_DIFFER: ClassVar[frozenset[str]] = DerivedManifest.MAY_DIFFER | {"top_k_share"}

    shard_rows: int
    top_k: int
    """k, at most the number of draftable tokens."""
    draftable: int
    """Number of tokens that the drafter can draft; the likeliest are chosen from these."""
    draftable_sha256: str | None
    """None: the whole vocabulary."""
    counts: int | None = None
    """Tokens of all outputs."""
    top_k_share: float | None = None
    """Mean total probability of the k likeliest tokens."""

    @property
    def widths(self) -> dict[str, tuple[int]]:
        return {"tokens": (self.top_k,), "log_probs": (self.top_k + (self.top_k < self.draftable),)}


def training_examples(
    settings: CausalDrafterRecipe,
    rows: datasets.Dataset,
    target: LoadedTarget,
    draftable: Tensor | None,
) -> Examples:
    """Returns the distilled rows as examples. With teacher.kind=cached they include the target's
    likeliest tokens; missing ones are computed and stored in a folder next to the rows.

    draftable [C]: the drafter's tokens; None for all. Runs in every process of an `accelerate
    launch`. Raises ConfigError, before anything is written, if the folder was made with other
    settings, another target or other rows.
    """
    if settings.teacher.kind == "online":
        return Examples(rows)
    distilled = distillations(settings)["data"].out
    folder = distilled.with_name(f"{distilled.name}-teacher")
    caching = TeacherCaching(settings, folder, target, rows, draftable)
    manifest = fill_folder(caching, folder, join_processes())
    teacher = open_tensors(folder, manifest, manifest.widths)

    def complete(examples: list[Example]) -> list[Example]:
        found = [teacher.read([one.row], "tokens", "log_probs") for one in examples]
        known = [TopRows(tokens.long(), log_probs) for tokens, log_probs in found]
        return [e._replace(target_rows=own) for e, own in zip(examples, known, strict=True)]

    return Examples(rows, complete)


@dataclass(frozen=True)
class TeacherCaching:
    """The `Filling` of the teacher cache."""

    settings: CausalDrafterRecipe
    folder: Path
    target: LoadedTarget
    outputs: datasets.Dataset
    draftable: Tensor | None
    kind: ClassVar[type[TeacherManifest]] = TeacherManifest

    def describe(self) -> TeacherManifest:
        vocabulary = self.target.model.get_output_embeddings().out_features
        draftable, digest = vocabulary, None
        if self.draftable is not None:
            draftable = len(self.draftable)
            tokens = self.draftable.cpu().numpy().astype(np.int64)
            digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        return TeacherManifest(
            **derived_from(self.target, self.outputs),
            top_k=min(self.settings.teacher.top_k, draftable),
            draftable=draftable,
            draftable_sha256=digest,
            shard_rows=SHARD_ROWS,
        )

    def write(self, manifest: TeacherManifest, shard: int, work: tqdm) -> None:
        """Writes one shard, computed in batches of rows of similar length (train.batch_tokens)."""
        numbers, found = manifest.rows_of(shard), {}
        rows = zip(numbers, self.outputs.select(numbers), strict=True)
        rows = [ShardRow(n, row["source_ids"], row["target_ids"]) for n, row in rows]
        for batch in batches_by_length(rows, self.settings.train.batch_tokens):
            texts = [one.source_ids for one in batch], [one.target_ids for one in batch]
            for one, own in zip(batch, teacher_force(self.target.model, *texts), strict=True):
                found[one.row] = top_rows(own.logits, manifest.top_k, self.draftable)
            work.update(len(batch))
        whole = [found[number] for number in numbers]
        tensors = {
            "lengths": torch.tensor([len(one.tokens) for one in whole]),
            "tokens": torch.cat([one.tokens for one in whole]).int(),
            "log_probs": torch.cat([one.log_probs for one in whole]).float(),
        }
        write_tensors(manifest.path(self.folder, shard), tensors)

    def complete(self, manifest: TeacherManifest) -> dict[str, Any]:
        rows = open_tensors(self.folder, manifest, manifest.widths)
        count = int(rows.lengths.sum())
        likely = [shard["log_probs"][:, : manifest.top_k] for shard in rows.shards]
        share = float(sum(log_probs.double().exp().sum() for log_probs in likely))
        return {"counts": count, "top_k_share": share / max(1, count)}

    def report(self, manifest: TeacherManifest) -> str:
        return (
            f"the target's rows at {manifest.counts:,} tokens of {manifest.rows:,} outputs; the "
            f"{manifest.top_k} likeliest of {manifest.draftable:,} tokens hold "
            f"{manifest.top_k_share:.4f} of the probability"
        )


def top_rows(logits: Tensor, top_k: int, draftable: Tensor | None = None) -> TopRows:
    """Returns the likeliest tokens of each row, with log-probabilities, and one for all others.

    draftable [C]: the tokens to choose from; the softmax is over the whole vocabulary in any case.
    Shapes: logits [T, V] -> tokens [T, k], log_probs [T, k] or [T, k + 1], k <= C.
    """
    log_probs = at_least_float32(logits).log_softmax(-1)
    if draftable is not None:
        log_probs = log_probs[:, draftable.to(log_probs.device)]
    _, indices = likeliest(log_probs, top_k)
    tokens = indices if draftable is None else draftable.to(indices.device)[indices]
    return TopRows(tokens, merged_rows(log_probs, indices, top_k < log_probs.shape[1]))
