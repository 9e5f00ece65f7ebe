"""What a recipe's drafter learns from: the target's own outputs, made where they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np

from drafttrain.config.commands import DistillConfig
from drafttrain.config.filling import fill_distill
from drafttrain.config.inputs import DataConfig
from drafttrain.config.reading import settings_of_group
from drafttrain.config.recipes import DistillingRecipe, HeadRecipe
from drafttrain.data.distill.batches import OpenDecoder
from drafttrain.data.distill.distill import distill
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.models.loading import LoadedTarget


def distillations(settings: DistillingRecipe) -> dict[str, DistillConfig]:
    """What is to be distilled, by the setting that its inputs come from. Raises ConfigError."""
    out = settings.distilled or settings.run / "distilled"
    found = {"data": distill_settings(settings, settings.data, out)}
    if settings.held_out is not None:
        most = settings.validation_rows
        limit = min(settings.held_out.limit or most, most)
        data = settings.held_out.model_copy(update={"limit": limit})
        found["held_out"] = distill_settings(settings, data, settings.run / "held_out")
    return found


def distill_settings(
    settings: DistillingRecipe | HeadRecipe, data: DataConfig, out: Path
) -> DistillConfig:
    """How a recipe distils these inputs into a folder. Raises ConfigError."""
    fixed = {"target": settings.target, "data": data, "out": out}
    if isinstance(settings, DistillingRecipe):
        fixed["encoded"] = settings.encoded or settings.run / "encoded"
    return settings_of_group(DistillConfig, "distill", fill_distill(settings.distill), fixed)


def distilled_rows(
    settings: DistillingRecipe, target: LoadedTarget, open_decoder: OpenDecoder
) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """The target's own outputs, for training and for validation; made where they are missing.

    open_decoder: as `distill` takes it.
    """
    wanted = distillations(settings)
    for distillation in wanted.values():
        distill(distillation, target, open_decoder)
    rows = {group: load_distilled(distillation.out) for group, distillation in wanted.items()}
    return rows["data"], rows.get("held_out")


def row_lengths(rows: datasets.Dataset) -> np.ndarray:
    """Tokens of source and output of each row. Shapes: -> [rows, 2]."""
    columns = rows.with_format("arrow")
    sizes = [
        np.concatenate([np.diff(c.offsets) for c in columns[:][name].chunks])
        for name in ("source_ids", "target_ids")
    ]
    return np.stack(sizes, axis=1)


def frequent_tokens(
    rows: datasets.Dataset, count: int, vocabulary: int, ends: int | Sequence[int] | None
) -> np.ndarray:
    """So many tokens, in rising order: the ends of outputs, then those that occur most often in
    them, then the first of the vocabulary. Shapes: -> [count]."""
    tokens = rows.with_format("arrow")[:]["target_ids"].combine_chunks().flatten().to_numpy()
    counts = np.bincount(tokens, minlength=vocabulary)
    counts[[] if ends is None else np.atleast_1d(ends)] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:count])
