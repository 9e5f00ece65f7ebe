"""Distillation settings for a tiny target, and readers of the written rows."""

from pathlib import Path

import pyarrow.parquet

from drafttrain.config.commands import DistillConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from tests.tiny_targets import random_sentences

SAMPLED = {"method": "sample", "sampling": {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}}


def settings(target: Path, out: str = "out", sentences: int = 20, **changes) -> DistillConfig:
    folder = target.parent
    texts = folder / f"{sentences}.txt"
    texts.write_text("\n".join(random_sentences(sentences)) + "\n")
    values = {
        "target": TargetConfig(path=str(target), device="cpu"),
        "data": DataConfig(path=str(texts)),
        "out": folder / out,
        "sampling": {"max_new_tokens": 12},
        "batch_tokens": 80,
        "shard_rows": 8,
    }
    return DistillConfig.model_validate(values | changes)


def changed(config: DistillConfig, **changes) -> DistillConfig:
    """Returns the settings with other values; those of a group are given as a dict."""
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = getattr(config, name).model_copy(update=value)
    return config.model_copy(update=changes)


def rows_of(folder: Path) -> list[dict]:
    paths = sorted(folder.glob("*.parquet"))
    return [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.parquet"))}
