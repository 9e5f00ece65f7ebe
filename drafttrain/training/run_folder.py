"""The folder of a run: settings and versions, metrics, and `final/` with the result."""

import json
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import yaml
from accelerate import Accelerator
from filelock import FileLock
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain import __version__
from drafttrain.config.base import Config, ConfigError
from drafttrain.config.command_line import describe_command
from drafttrain.config.reading import dump_settings
from drafttrain.config.recipes import TrainConfig
from drafttrain.data.shards.store import differences
from drafttrain.data.shards.writing import (
    named_disk_errors,
    only_writer,
    remove_leftovers,
    whole_folder,
    write_file,
)
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.language_models import keep_writable
from drafttrain.models.target_embeddings import saved_weights
from drafttrain.models.weight_files import named_errors
from drafttrain.training.checkpoints import checkpoint_folders, remove_unfinished

LOOSE = {"threads", "workers", "trackers", "validate_every", "checkpoint_every", "log_every"}
"""Settings that may change when a run is resumed: they do not affect the result."""
OWNED: dict[Path, FileLock] = {}
"""Locks of this process's runs by absolute path, held until the process ends."""
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "safetensors")


def check_run(run: Path, settings: Config) -> None:
    """Raises ConfigError if `run` is a file or a folder of a run with other settings.

    Names the first setting that differs; writes nothing. Before the first checkpoint, the training
    settings (`train`) may change, and limits of inputs, as distillations can grow and their outputs
    stay.
    """
    if run.exists() and not run.is_dir():
        raise ConfigError(f"run = {str(run)!r} is a file; give a folder")
    file = run / "run.yaml"
    if not file.exists():
        return
    remedy = "delete this file to continue with the given settings (the checkpoints check them), "
    remedy += "or give run=ANOTHER_FOLDER"
    with named_errors(f"{file} cannot be read", remedy, (yaml.YAMLError, ValueError)):
        before = yaml.safe_load(file.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("it holds no settings")
    free = LOOSE if checkpoint_folders(run) else LOOSE | {"train", "limit"}
    for key, old, new in differences(before, settings.model_dump(mode="json"), free):
        raise ConfigError(
            f"run = {str(run)!r} was begun with {key}={old!r}, not {new!r}; give "
            "run=ANOTHER_FOLDER, or the old value to continue it"
        )


def open_run(run: Path, settings: Config) -> None:
    """Creates the run folder, or opens that of an unfinished run; records settings and versions;
    call it on one process only. Raises ConfigError, also if another process works on the run."""
    check_run(run, settings)
    if run.absolute() not in OWNED:
        OWNED[run.absolute()] = only_writer(run, "run")
    remove_leftovers(run)
    remove_unfinished(run)
    write_file(run / "run.yaml", dump_settings(settings))
    environment = {"python": platform.python_version(), "platform": platform.platform()}
    environment |= {name: version(name) for name in PACKAGES} | {"drafttrain": __version__}
    environment["command"] = describe_command(sys.argv)
    write_file(run / "environment.json", json.dumps(environment, indent=2) + "\n")


def save_final(
    run: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "final"
) -> Path:
    """Writes `final/` atomically; `from_pretrained` can load it, unless the model uses its target's
    embeddings."""
    keep_writable(model)
    with whole_folder(run / name) as folder:
        model.save_pretrained(folder, state_dict=saved_weights(model))
        tokenizer.save_pretrained(folder)
    return run / name


def save_heads(run: Path, heads: Iterable[AcceptanceHead]) -> Path:
    """Writes `final/` with a folder for each head, such as D3-w6, atomically."""
    with whole_folder(run / "final") as folder:
        for head in heads:
            head.save_pretrained(folder / head.config.name, safe_serialization=True)
    return run / "final"


class MetricsLog:
    """Writer of metrics to metrics.jsonl in the run folder and to the configured trackers."""

    def __init__(self, accelerator: Accelerator, run: Path, step: int, settings: TrainConfig):
        self.accelerator, self.file = accelerator, run / "metrics.jsonl"
        if settings.trackers:
            accelerator.init_trackers("drafttrain", config={"run": run.name})
        if accelerator.is_main_process and self.file.exists():  # drop repeated steps
            lines = self.file.read_text(encoding="utf-8").splitlines()
            kept = [x for x in lines if x.endswith("}") and json.loads(x)["step"] <= step]
            write_file(self.file, "".join(f"{x}\n" for x in kept))

    def write(self, step: int, values: dict[str, float]) -> None:
        self.accelerator.log(values, step=step)
        if self.accelerator.is_main_process and values:
            line = json.dumps({"step": step} | values) + "\n"
            with named_disk_errors(self.file.parent), self.file.open("a", encoding="utf-8") as file:
                file.write(line)
