"""Checkpoints of a run: written whole or not at all, resumed exactly, rotated, averaged.

A checkpoint folder holds `weights.safetensors` (the trained model, whole, whatever the sharding),
`state/` (what Accelerate needs to go on: optimizer and sharded weights) and `progress.json`. It is
written under a temporary name and renamed last, so that a folder that has its name is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

WEIGHTS = "weights.safetensors"
PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands. Everything else (data position, randomness) follows from the step."""

    step: int
    world_size: int
    fingerprint: str
    """Of the settings that decide what the next step computes."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to other settings."""


def checkpoint_folders(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.name.startswith("step-") and p.is_dir())


def save_checkpoint(
    accelerator: Accelerator, objective: nn.Module, run: Path, progress: Progress, keep: int
) -> None:
    """Write step-N under a temporary name, rename it, then delete all but the newest `keep`."""
    folder = run / "checkpoints"
    final = folder / f"step-{progress.step:08d}"
    temporary = folder / f".writing-{final.name}"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    weights = trained_weights(accelerator, objective)
    accelerator.save_state(str(temporary / "state"), safe_serialization=True)
    if accelerator.is_main_process:
        save_file(weights, temporary / WEIGHTS)
        (temporary / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
        _flush(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        for old in checkpoint_folders(run)[:-keep]:
            dead = old.with_name(f".deleting-{old.name}")
            old.rename(dead)
            shutil.rmtree(dead)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, folder: Path, fingerprint: str) -> Progress:
    """Put objective and optimizer back to a checkpoint. Raises CheckpointError."""
    try:
        progress = Progress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be read ({error}); delete it to go on from the one before"
        ) from None
    if progress.fingerprint != fingerprint:
        raise CheckpointError(
            f"checkpoint {folder} was made with other settings (see run.yaml beside it); "
            f"train into another run folder, or put the settings back"
        )
    if progress.world_size != accelerator.num_processes:
        raise CheckpointError(
            f"checkpoint {folder} was made by {progress.world_size} processes, this run has "
            f"{accelerator.num_processes}; start as many, so that steps stay the same"
        )
    accelerator.load_state(str(folder / "state"))
    return progress


def trained_weights(accelerator: Accelerator, objective: nn.Module) -> dict[str, Tensor]:
    """Full weights of the objective's model, named as the model names them."""
    state = accelerator.get_state_dict(objective)
    if not accelerator.is_main_process:
        return {}
    prefix = "model."
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.items()}


def average_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Arithmetic mean of the parameters in several files (SpecDec: the last 10 checkpoints)."""
    if not files:
        raise CheckpointError("no checkpoints to average")
    total: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():
                tensor = weights.get_tensor(name)
                dtypes[name] = tensor.dtype
                total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (value / len(files)).to(dtypes[name]) for name, value in total.items()}


def _flush(folder: Path) -> None:
    """Make the files durable before the rename that declares them complete."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
