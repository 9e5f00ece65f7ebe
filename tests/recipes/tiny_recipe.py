"""A recipe's settings on tiny texts, and functions that run recipes in this process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.commands.export import export
from drafttrain.config.base import Interrupted
from drafttrain.config.commands import ExportConfig
from drafttrain.config.runs import newest_run
from drafttrain.export import verify
from drafttrain.training import loop
from tests.commanding import ended, exit_code
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target

ONCE = ["decode.sampling.max_new_tokens=8"]
QUICK = ["repeats=1", "warmup=0", "baselines=[]", *ONCE]
"""Settings of `eval` for the shortest measurement."""


def write_texts(folder: Path, rows: int, held_out_rows: int) -> None:
    others = [" ".join(reversed(one.split())) for one in random_sentences(held_out_rows)]
    for name, own in (("train", random_sentences(rows)), ("val", others)):
        (folder / f"{name}.txt").write_text("\n".join(own) + "\n")


def write_recipe(folder: Path, rows: int, held_out_rows: int, **settings: Any) -> Path:
    """Writes recipe.yaml for the folder's target, with training and validation sentences."""
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


def language_project(folder: Path, **changes: dict[str, Any]) -> list[str]:
    """Makes a decoder-only target of four layers, 8 prompts and 3 held-out prompts, and returns the
    arguments of a run of 6 steps with a checkpoint every 2. changes: settings by group."""
    save_target(tiny_model("llama", num_hidden_layers=4).float(), folder / "target")
    settings = {
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 3, "output_tokens": 12},
        "objective": {"packed_tokens": 60},
        "train": {"max_steps": 6, "batch_tokens": 90, "checkpoint_every": 2, "threads": 1},
    }
    for group, values in changes.items():
        settings[group] = settings.get(group, {}) | values
    return ["--config", str(write_recipe(folder, 8, 3, **settings))]


def resumed_as_if_never_stopped(
    main: Callable[[list[str]], None], arguments: list[str], folder: Path, *models: str
) -> None:
    """Asserts that a run stopped after its first checkpoint and resumed ends with the same weights
    bit for bit as an uninterrupted run.

    The arguments must name FOLDER/run as the run. models: folders of the run to compare.
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


def trained_once(
    main: Callable[[list[str]], None],
    arguments: list[str],
    run: Path,
    capsys: pytest.CaptureFixture,
) -> str:
    """Asserts that a dry run prints the plan and writes nothing, that the recipe then trains, and
    that it leaves a finished run alone. Returns what training printed."""
    assert exit_code(main, *arguments, "--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("parameters", "distillation", "batches", "steps", "disk", "memory"):
        assert word in plan
    assert not run.exists()
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert exit_code(main, *arguments) == 0 and "is finished" in capsys.readouterr().out
    assert newest_run(run.parent).folder == run
    return printed


def exported(run: Path, capsys: pytest.CaptureFixture, **settings: Any) -> Path:
    """Exports a run, asserts that the export decodes as its target does, and returns its folder."""
    out = run.parent / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verify, "NEW_TOKENS", 8)
        export(ExportConfig(drafter=str(run), out=out, **settings), reload=verify.compare)
    assert "the target's output unchanged for " in capsys.readouterr().out
    return out


def decodes_as_validated(run: Path, capsys: pytest.CaptureFixture) -> dict[str, Any]:
    """Asserts that `eval` and `generate` give the outputs of plain decoding, and that `eval`, also
    teacher-forced, gives the mean acceptance length of validation. Returns the drafter's run in the
    report with the last validation."""
    log = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    validation = [entry for entry in log if "mean_acceptance_length" in entry][-1]
    others = [f"others={{start: {{drafter: {run / 'start'}}}, copied: {{drafter: max-gram}}}}"]
    assert ended("eval", "--drafter", run, *QUICK, *others) == 0
    runs = json.loads((run / "report.json").read_text())["runs"]
    assert [one["name"] for one in runs[2:]] == ["start", "copied"]
    assert all(one["metrics"]["identical"]["value"] == 1.0 for one in runs[1:])
    forced = ["--mode", "teacher-forced", "--report", run.parent / "forced.json"]
    assert ended("eval", "--drafter", run, *ONCE, *forced) == 0
    played = json.loads((run.parent / "forced.json").read_text())["runs"][-1]
    for one in (runs[1], played):
        length = one["metrics"]["mean_acceptance_length"]["value"]
        assert length == pytest.approx(validation["mean_acceptance_length"])
    texts = []
    for name in (run, "none"):
        given = ["--target", run.parent / "target", "--text", "w5 w6 w7", "--drafter", name]
        assert ended("generate", *given, "--max-new-tokens", "5") == 0
        texts.append(capsys.readouterr().out.splitlines()[-1])
    assert texts[0] == texts[1]
    return runs[1] | {"validation": validation}
