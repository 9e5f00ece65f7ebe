"""A tiny pair with distilled outputs, and its cache of hidden states."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from drafttrain.config.commands import CacheConfig
from drafttrain.data.distill.distill import distill
from tests.data.distill import tiny_distill
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

SAMPLING = {"temperature": 1.0, "top_k": 20, "max_new_tokens": 12}


MODELS = ("marian", "llama")


def make_pair(folder: Path, family: str = "marian", sentences: int = 9) -> Path:
    """Writes the folders target, drafter and distilled (sampled outputs of the target)."""
    target = save_target(tiny_model(family), folder / "target")
    tiny_model(family, seed=9).save_pretrained(folder / "drafter")
    sampled = {"method": "sample", "sampling": SAMPLING, "batch_tokens": 60, "shard_rows": 100}
    distill(tiny_distill.settings(target, "distilled", sentences, **sampled))
    return folder


def settings(pair: Path, out: str = "out", **changes) -> CacheConfig:
    values = {
        "target": {"path": str(pair / "target"), "device": "cpu"},
        "drafter": str(pair / "drafter"),
        "distilled": pair / "distilled",
        "out": pair / out,
        "batch_tokens": 60,
        "shard_rows": 4,
        "seed": 2,
        "state": "token",
    }
    return CacheConfig.model_validate(values | changes)


def columns(folder: Path, mix: int = 0) -> dict[str, torch.Tensor]:
    """Reads the columns of all shards; adds `rows` [N], the distilled row of each position."""
    parts = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    names = ("lengths", "hidden", "acceptance", "positions")
    found = {name: torch.cat([part[f"{mix}.{name}"] for part in parts]) for name in names}
    lengths = found.pop("lengths")
    return found | {"rows": torch.arange(len(lengths)).repeat_interleave(lengths)}
