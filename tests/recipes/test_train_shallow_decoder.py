"""The recipe end to end on a tiny Whisper: one command, resumed bit for bit, measured by `eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, WhisperForCausalLM

from drafttrain.cli import main as drafttrain
from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.config.runs import newest_run
from drafttrain.export.reload import compare
from drafttrain.export.verify import INPUTS
from recipes.train_shallow_decoder import main
from tests.recipes.tiny_recipe import exit_code, resumed_as_if_never_stopped
from tests.tiny_models import tiny_model
from tests.tiny_speech import save_clips, save_whisper
from tests.tiny_targets import save_target


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def make_project(folder: Path) -> list[str]:
    """A Whisper, 6 clips, 3 held-out ones and 6 steps with a checkpoint every 2: arguments."""
    save_whisper(folder / "target")
    save_clips(folder / "train", 6)
    save_clips(folder / "val", 3)
    settings = {
        "run": str(folder / "run"),
        "target": {"path": str(folder / "target")},
        "data": {"path": str(folder / "train" / "clips.jsonl")},
        "held_out": {"path": str(folder / "val" / "clips.jsonl")},
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"decoder_layers": 1, "k": 3},
        "train": {"max_steps": 6, "batch_tokens": 24, "checkpoint_every": 2, "threads": 1},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    return ["--config", str(file)]


def test_one_command_leaves_a_decoder_that_eval_measures_as_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = make_project(tmp_path)
    assert exit_code(main, *arguments, "--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("parameters", "distillation", "batches", "steps", "disk", "memory", "encoded"):
        assert word in plan
    assert not (tmp_path / "run").exists()
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    drafter = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    assert isinstance(drafter, WhisperForCausalLM) and drafter.config.decoder_layers == 1
    before = load_file(tmp_path / "target" / "model.safetensors")
    after = drafter.state_dict()
    for name, trained in (("embed_tokens", False), ("layers.0.fc1", True), ("layer_norm", True)):
        theirs = before[f"model.decoder.{name.replace('0', '1')}.weight"]
        assert torch.equal(after[f"model.decoder.{name}.weight"], theirs) != trained
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    validation = next(entry for entry in log if "mean_acceptance_length" in entry)
    assert validation["mean_acceptance_length"] >= 1 and validation["held_out_loss"] > 0
    assert exit_code(main, *arguments) == 0 and "is finished" in capsys.readouterr().out
    assert newest_run(tmp_path).recipe.drafter.k == 3
    quick = ["repeats=1", "warmup=0", "bootstrap=20", "baselines=[]"]
    quick.append("decode.sampling.max_new_tokens=8")
    assert exit_code(drafttrain, "eval", "--drafter", str(tmp_path / "run"), *quick) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["runs"][1]["name"].startswith("causal k=")
    assert report["runs"][1]["metrics"]["identical"]["value"] == 1.0
    export(ExportConfig(drafter=str(tmp_path / "run"), out=tmp_path / "out"), reload=compare)
    assert (
        f"drafts for {INPUTS} inputs too; the target's output unchanged" in capsys.readouterr().out
    )
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert settings["num_assistant_tokens"] == 3  # as in validation


def test_interrupted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    arguments = [*make_project(tmp_path), f"encoded={tmp_path / 'encoded'}"]
    resumed_as_if_never_stopped(main, arguments, tmp_path, "final")


def test_targets_of_texts_and_too_many_layers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments = make_project(tmp_path)
    assert exit_code(main, *arguments, "drafter.decoder_layers=3") == 2
    assert "3 decoder layers are more than the target's 2" in capsys.readouterr().err
    texts = save_target(tiny_model("marian").float(), tmp_path / "marian")
    assert exit_code(main, *arguments, f"target.path={texts}") == 2
    told = capsys.readouterr().err
    assert "'marian' model, but shallow decoders are trained for Whisper" in told
    assert "Traceback" not in told and not (tmp_path / "run").exists()
