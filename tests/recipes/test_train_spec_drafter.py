"""The recipe end to end on a tiny target: one command, safe against kill -9."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.processes.killing import kill_nine_when
from tests.tiny_drafters import shared
from tests.tiny_targets import random_sentences, save_target

RECIPE = Path(__file__).parents[2] / "recipes" / "train_spec_drafter.py"
ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """The recipe on 60 sentences and 10 held-out ones, 12 steps, a checkpoint every 3."""
    target = save_target(shared("marian"), tmp_path / "target")
    for name, count in (("train", 60), ("val", 10)):
        (tmp_path / f"{name}.txt").write_text("\n".join(random_sentences(count)) + "\n")
    settings = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {"path": str(tmp_path / "train.txt")},
        "held_out": {"path": str(tmp_path / "val.txt")},
        "distill": {"sampling": {"max_new_tokens": 12}, "shard_rows": 20},
        "drafter": {"k": 4, "decoder_layers": 1, "dropout": 0.2},
        "train": {"max_steps": 12, "batch_tokens": 400, "checkpoint_every": 3, "warmup": 2},
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    return [sys.executable, str(RECIPE), "--config", str(file)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_killed_training_ends_with_the_same_bits(command: list[str], tmp_path: Path) -> None:
    done = run([*command, f"run={tmp_path / 'whole'}"])
    assert done.returncode == 0, done.stderr
    cut = tmp_path / "run"
    checkpoints = cut / "checkpoints"
    kill_nine_when(
        lambda: checkpoints.is_dir() and any(p.name[:5] == "step-" for p in checkpoints.iterdir()),
        command,
        tmp_path / "log",
        ENVIRONMENT,
    )
    assert not (cut / "final").exists()
    resumed = run(command)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming" in resumed.stdout
    for file in ("final/model.safetensors", "distilled/shard-00000.parquet"):
        assert (cut / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    drafter = SpecDrafter.from_pretrained(cut / "final")
    assert drafter.config.target["path"] == str(tmp_path / "target")
    again = run(command)
    assert again.returncode == 0 and "is finished" in again.stdout


def test_dry_run_prints_the_plan_and_writes_nothing(command: list[str], tmp_path: Path) -> None:
    done = run([*command, "--dry-run"])
    assert done.returncode == 0, done.stderr
    for word in ("parameters", "distillation", "batches", "steps", "disk", "memory"):
        assert word in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("drafter.prefix_attention=bidirectional", "drafter.slots=paper"),
        ("target.path=/nowhere", "/nowhere"),
        ("train.learning_rat=1", "learning_rate"),
        ("train.batch_tokens=20", "train.batch_tokens=20"),
    ],
)
def test_wrong_settings_end_in_one_line(command: list[str], override: str, message: str) -> None:
    done = run([*command, override])
    assert done.returncode == 2
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if "train_spec_drafter.py:" in line]) == 1
    assert "Traceback" not in done.stderr
