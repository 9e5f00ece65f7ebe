"""Small commands to interrupt, and checks of the folders that they leave."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import yaml

from drafttrain import cli
from drafttrain.data.hidden.states import CacheManifest
from drafttrain.data.shards.outputs import Manifest
from drafttrain.training.checkpoints import check_files, checkpoint_folders, read_progress
from recipes import train_spec_drafter
from tests.recipes.tiny_recipe import write_texts
from tests.tiny_drafters import shared
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

OWN = {"environment.json", ".writing.lock"}
"""Files that differ between runs: the command line and locks."""
SENTENCES, HELD_OUT = 24, 4


STAGES: dict[str, Callable[[Path], None]] = {
    "distil": lambda made: cli.main(["distill", f"--config={made}/distill.yaml", "--out=shards"]),
    "train": lambda made: train_spec_drafter.main([f"--config={made}/recipe.yaml", "run=run"]),
    "cache": lambda made: cli.main(["cache", f"--config={made}/cache.yaml", "--out=cache"]),
    "eval": lambda made: cli.main(
        ["eval", f"--config={made}/eval.yaml", "--report=eval/report.json"]
    ),
}
"""Commands by name, called with the folder of the inputs and run in an empty folder. The last two
use the results of the first two."""
SETTINGS = """
distill:
  target: &target {path: MADE/target}
  data: &data {path: MADE/train.txt}
  method: sample
  sampling: {temperature: 1.0, top_k: 20, max_new_tokens: 8}
  shard_rows: 5
cache:
  target: *target
  drafter: MADE/drafter
  distilled: MADE/whole/distil/shards
  shard_rows: 5
recipe:
  target: *target
  data: *data
  held_out: {path: MADE/val.txt}
  distill: {sampling: {max_new_tokens: 8}, shard_rows: 8}
  drafter: {k: 4, decoder_layers: 1, dropout: 0.2}
  train: {threads: 1, max_steps: 6, batch_tokens: 200, checkpoint_every: 2,
          average: 2, validate_every: 3, log_every: 1, warmup: 2}
eval:
  target: *target
  data: {path: MADE/val.txt}
  decode: {drafter: MADE/whole/train/run/final, sampling: {max_new_tokens: 12}}
"""
"""Settings of each stage; MADE stands for the folder of the inputs."""


def make_inputs(folder: Path) -> None:
    """Makes the models, texts and settings of all stages."""
    torch.set_num_threads(1)
    save_target(shared("marian"), folder / "target")
    tiny_model("marian", seed=9).save_pretrained(folder / "drafter")
    write_texts(folder, SENTENCES, HELD_OUT)
    for name, values in yaml.safe_load(SETTINGS.replace("MADE", str(folder))).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def contents(work: Path, name: str = "") -> dict[str, bytes]:
    """Returns all files of a stage (or of one of its folders) that belong to the result, by path.

    Only the newest checkpoint counts, because a stopped run has a checkpoint of that step instead
    of an older one.
    """
    older = checkpoint_folders(work / "run")[:-1]
    return {
        path.relative_to(work).as_posix(): content_of(path)
        for path in sorted((work / name).rglob("*"))
        if path.is_file()
        and path.name not in OWN
        and not any(path.is_relative_to(folder) for folder in older)
        and not (path.parent.name == "eval" and path.suffix == ".part")
    }


def content_of(path: Path) -> bytes:
    """Returns a file's content; in an evaluation without parts that depend on time: dates,
    fractions and plots."""
    content = path.read_bytes()
    if path.parent.name != "eval":
        return content
    if path.suffix not in (".json", ".jsonl"):
        return b""
    dateless = {"parse_float": lambda _: None, "object_hook": lambda part: part | {"date": None}}
    documents = content.splitlines() if path.suffix == ".jsonl" else [content]
    return json.dumps([json.loads(one, **dateless) for one in documents]).encode()


def differences(work: Path, whole: Path) -> list[str]:
    """Returns the files that differ between a finished stage and the uninterrupted one, including
    files that only one of them has."""
    found, expected = contents(work), contents(whole)
    names = sorted(found.keys() | expected.keys())
    return [name for name in names if found.get(name) != expected.get(name)]


def damage(stage: str, work: Path, whole: Path) -> list[str]:
    """Checks the folder of an interrupted stage and returns what is wrong.

    Files under their final names must be complete: shards and finished folders equal those of the
    uninterrupted run byte for byte, and checkpoints match their digests.
    """
    wrong = []
    for path in work.rglob("shard-*"):
        name = path.relative_to(work)
        if path.read_bytes() != (whole / name).read_bytes():
            wrong.append(f"{name} differs")
    for name in ("run/start", "run/final"):
        if (work / name).exists() and contents(work, name) != contents(whole, name):
            wrong.append(f"{name} is neither whole nor absent")
    kind = CacheManifest if stage == "cache" else Manifest
    checks = [partial(check_checkpoint, folder) for folder in checkpoint_folders(work / "run")]
    checks += [partial(kind.read, path.parent) for path in work.rglob("manifest.json")]
    checks += [partial(content_of, path) for path in work.glob("eval/*.json*")]
    for check in checks:
        try:
            check()
        except ValueError as error:
            wrong.append(str(error))
    return wrong


def check_checkpoint(folder: Path) -> None:
    check_files(folder, read_progress(folder))


def newest_step(work: Path) -> int:
    """Returns the step of the newest checkpoint; 0 if there is none."""
    return max((read_progress(one).step for one in checkpoint_folders(work / "run")), default=0)
