"""A recipe's settings on tiny texts, and how it is run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.cli import main as drafttrain
from drafttrain.config.base import Interrupted
from drafttrain.training import loop
from tests.tiny_targets import random_sentences

QUICK = ["repeats=1", "warmup=0", "bootstrap=20", "baselines=[]"]
QUICK += ["decode.sampling.max_new_tokens=8"]
"""Of `eval`: a measurement as short as can be."""


def write_texts(folder: Path, rows: int, held_out_rows: int) -> None:
    for name, count in (("train", rows), ("val", held_out_rows)):
        (folder / f"{name}.txt").write_text("\n".join(random_sentences(count)) + "\n")


def write_recipe(folder: Path, rows: int, held_out_rows: int, **settings: Any) -> Path:
    """recipe.yaml for the folder's target, on so many sentences to train and to validate on."""
    write_texts(folder, rows, held_out_rows)
    places = {
        "run": str(folder / "run"),
        "target": {"path": str(folder / "target")},
        "data": {"path": str(folder / "train.txt")},
        "held_out": {"path": str(folder / "val.txt")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(places | settings))
    return file


def exit_code(main: Callable[[list[str]], None], *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def resumed_as_if_never_stopped(
    main: Callable[[list[str]], None], arguments: list[str], folder: Path, *models: str
) -> None:
    """A run that stops after its first checkpoint, and goes on, ends with the bits of a whole one.

    arguments name FOLDER/run as the run. models: folders of the run to compare.
    """
    assert exit_code(main, *arguments, f"run={folder / 'whole'}") == 0
    arguments = [*arguments, f"distilled={folder / 'whole' / 'distilled'}"]
    saved = loop.save_checkpoint

    def save_and_stop(*given: Any) -> None:
        saved(*given)
        raise Interrupted("stopped by the test")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "save_checkpoint", save_and_stop)
        assert exit_code(main, *arguments) != 0
    assert not (folder / "run" / "final").exists()
    assert exit_code(main, *arguments) == 0
    assert not (folder / "run" / "distilled").exists()
    for model in models:
        cut, whole = (folder / run / model / "model.safetensors" for run in ("run", "whole"))
        assert cut.read_bytes() == whole.read_bytes()


def plans_and_writes_nothing(
    main: Callable[[list[str]], None],
    arguments: list[str],
    run: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    assert exit_code(main, *arguments, "--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("parameters", "distillation", "batches", "steps", "disk", "memory"):
        assert word in plan
    assert not run.exists()


def forced_length(run: Path, *more: str) -> float:
    """The mean acceptance length of a run's drafter by `eval --mode teacher-forced`."""
    report = run.parent / "forced.json"
    forced = [*QUICK, "--mode", "teacher-forced", "--report", str(report), *more]
    assert exit_code(drafttrain, "eval", "--drafter", str(run), *forced) == 0
    metrics = json.loads(report.read_text())["runs"][-1]["metrics"]
    return metrics["mean_acceptance_length"]["value"]


def generates_what_plain_decoding_does(
    run: Path, target: Path, capsys: pytest.CaptureFixture
) -> None:
    said = []
    for name in (str(run), "none"):
        given = ["--target", str(target), "--text", "w5 w6 w7", "--drafter", name]
        assert exit_code(drafttrain, "generate", *given, "--max-new-tokens", "5") == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[0] == said[1]
