"""Checkpoints of a run: written atomically, resumed exactly, rotated, averaged.

A checkpoint folder has `weights.safetensors` (the trained weights, unsharded; frozen weights come
from the run's start), `state/` (Accelerate's state: optimizer, and weights if they are sharded;
read as plain tensors only, so that no file can run code) and `progress.json` with the digests of
all these files. Accelerate's `total_limit` cannot be used: it deletes the oldest checkpoint before
the new one is written, and counts the checkpoints of interrupted runs.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, load
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.data.shards.writing import UNFINISHED, whole_folder
from drafttrain.models.weight_files import first_line

WEIGHTS = "weights.safetensors"
PROGRESS = "progress.json"
KEPT_CHECKPOINTS = 2
"""Minimal number of newest checkpoints that a run keeps; more if more are averaged."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run. The step determines everything else: data position, randomness."""

    step: int
    world_size: int
    fingerprint: str
    """Hash of the settings that determine what the next step computes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of every other file, by path relative to the checkpoint."""


class CheckpointError(ValueError):
    """A checkpoint is damaged or belongs to other settings."""


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether FSDP or DeepSpeed manages the weights."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


def checkpoint_folders(run: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())


def remove_unfinished(run: Path) -> None:
    """Deletes half-written folders of a killed run; call only while no other run writes here."""
    for path in (run / "checkpoints").glob(".*"):
        if path.name.startswith(UNFINISHED):
            shutil.rmtree(path)


@dataclass(frozen=True)
class Schedule:
    """The steps at which regular checkpoints are written, and how many of them are kept.

    The checkpoint of an interrupted run is used only to resume it: it replaces no regular one and
    is not averaged, so the resumed run ends with the weights of an uninterrupted one.
    """

    every: int
    total: int
    keep: int

    def due(self, folders: Sequence[Path]) -> list[Path]:
        steps = {folder: int(folder.name.removeprefix("step-")) for folder in folders}
        return [f for f, step in steps.items() if step % self.every == 0 or step == self.total]


def save_checkpoint(
    accelerator: Accelerator,
    objective: nn.Module,
    run: Path,
    progress: Progress,
    schedule: Schedule,
) -> None:
    """Writes step-N, then deletes the checkpoints that are no longer kept.

    Raises DiskFull if the disk is full; earlier checkpoints are then unchanged.
    """
    final, main = run / "checkpoints" / f"step-{progress.step:08d}", accelerator.is_main_process
    with whole_folder(final, writes=main) as temporary:
        accelerator.wait_for_everyone()  # the folder exists
        weights = trained_weights(accelerator, objective)
        # hides the warning that tied weights are saved once
        logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
        hook = accelerator.register_save_state_pre_hook(lambda _, whole, __: whole.clear())
        accelerator.save_state(str(temporary / "state"), safe_serialization=True)
        hook.remove()
        accelerator.wait_for_everyone()  # every process has written its part
        if main:
            save_file(weights, temporary / WEIGHTS)
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            digests = {path.relative_to(temporary).as_posix(): _digest(path) for path in files}
            record = json.dumps(asdict(replace(progress, files=digests)))
            (temporary / PROGRESS).write_text(record, encoding="utf-8")
    if main:
        folders = checkpoint_folders(run)
        for old in sorted({*folders} - {final, *schedule.due(folders)[-schedule.keep :]}):
            dead = old.with_name(f"{UNFINISHED[1]}{old.name}")
            old.rename(dead)
            shutil.rmtree(dead)
    accelerator.wait_for_everyone()


def load_checkpoint(
    accelerator: Accelerator, objective: nn.Module, folder: Path, fingerprint: str
) -> Progress:
    """Restores objective and optimizer from a checkpoint. Raises CheckpointError."""
    progress = read_progress(folder)
    if progress.fingerprint != fingerprint:
        raise CheckpointError(
            f"checkpoint {folder} was made with other settings (see its run.yaml); "
            f"train into another run folder, or put the settings back"
        )
    if progress.world_size != accelerator.num_processes:
        raise CheckpointError(
            f"checkpoint {folder} was made by {progress.world_size} processes, this run has "
            f"{accelerator.num_processes}; start as many, so that steps stay the same"
        )
    if accelerator.is_main_process:
        check_files(folder, progress)
    try:
        for file in sorted((folder / "state").glob("*.pkl")):
            load(file)  # Accelerate ignores a random state that it cannot read
        hook = accelerator.register_load_state_pre_hook(lambda whole, _: whole.clear())
        accelerator.load_state(str(folder / "state"), load_kwargs={"weights_only": True})
        hook.remove()
        if not is_sharded(accelerator):
            model = accelerator.unwrap_model(objective).model
            model.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _broken(folder, f"cannot be read as plain numbers ({first_line(error)})") from error
    return progress


def read_progress(folder: Path) -> Progress:
    """Reads the progress of a checkpoint. Raises CheckpointError if it cannot be read."""
    try:
        progress = Progress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))
        if folder.name != f"step-{progress.step:08d}":
            raise ValueError(f"its {PROGRESS} says step {progress.step}")
    except (OSError, ValueError, TypeError) as error:
        raise _broken(folder, f"cannot be read ({error})") from None
    return progress


def check_files(folder: Path, progress: Progress) -> None:
    """Raises CheckpointError if a file is missing, changed, or outside the checkpoint."""
    for name, digest in progress.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise _broken(folder, f"has a {PROGRESS} that names {name!r}, which lies outside")
        if not path.is_file():
            raise _broken(folder, f"has lost its {name}")
        if _digest(path) != digest:
            raise _broken(folder, f"is damaged: {name} is not what was written")


def _broken(folder: Path, what: str) -> CheckpointError:
    """Returns an error that states what to delete, and where the run resumes afterwards."""
    folders = checkpoint_folders(folder.parent.parent)
    later = " and every later one" if folders[-1] > folder else ""
    resumes = "starts from its beginning"
    if before := [other.name for other in folders if other < folder]:
        resumes = f"continues from {before[-1]}, to the same weights"
    return CheckpointError(f"checkpoint {folder} {what}; delete it{later}: the run {resumes}")


def trained_weights(accelerator: Accelerator, objective: nn.Module) -> dict[str, Tensor]:
    """Returns the unsharded parameters with gradient and the buffers of the objective's model, by
    the model's names, on the main process; {} on others. All processes must call it."""
    state = accelerator.get_state_dict(objective)
    if not accelerator.is_main_process:
        return {}
    model = accelerator.unwrap_model(objective).model
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names |= {name for name, _ in model.named_buffers()}
    return {
        name: state[f"model.{name}"].detach().cpu().contiguous().clone()
        for name in names
        if f"model.{name}" in state
    }


def average_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """Returns the arithmetic mean of the weights of checkpoints (SpecDec: the last 10).

    Raises CheckpointError for a damaged checkpoint, and if there is none.
    """
    if not folders:
        raise CheckpointError("no checkpoints to average")
    total: dict[str, Tensor] = {}
    for folder in folders:
        check_files(folder, read_progress(folder))
        weights = load_file(folder / WEIGHTS)
        for name, value in weights.items():
            total[name] = total.get(name, 0.0) + value.double()
    return {name: (value / len(folders)).to(weights[name]) for name, value in total.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
