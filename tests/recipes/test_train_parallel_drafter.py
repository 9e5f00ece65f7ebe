"""The recipe end to end on a tiny target: one command, resumed bit for bit, `eval`, `export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from drafttrain.cli import main as drafttrain
from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.config.kinds import CAUSAL, PARALLEL, kind_of
from drafttrain.config.runs import newest_run
from drafttrain.export.verify import compare
from recipes.train_parallel_drafter import main
from tests.comparing import same_but_undrafted, same_weights
from tests.recipes.tiny_recipe import exit_code, resumed_as_if_never_stopped, write_texts
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def make_project(folder: Path) -> list[str]:
    """A target of four layers, 8 prompts and 3 held-out ones, and 6 steps with a checkpoint every
    2: arguments."""
    save_target(tiny_model("llama", num_hidden_layers=4).float(), folder / "target")
    write_texts(folder, 8, 3)
    settings = {
        "run": str(folder / "run"),
        "target": {"path": str(folder / "target")},
        "data": {"path": str(folder / "train.txt")},
        "held_out": {"path": str(folder / "val.txt")},
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 3, "output_tokens": 12},
        "initialise": {"layers": [0, 3]},
        "objective": {"cross_entropy": 0.5, "acceptance_weight": True, "packed_tokens": 60},
        "train": {"max_steps": 6, "batch_tokens": 90, "checkpoint_every": 2, "threads": 1},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(settings))
    return ["--config", str(file)]


def test_one_command_leaves_a_drafter_that_eval_generate_and_export_take(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments, run = make_project(tmp_path), tmp_path / "run"
    assert exit_code(main, *arguments, "--dry-run") == 0
    plan = capsys.readouterr().out
    for word in ("parameters", "distillation", "batches", "steps", "disk", "memory"):
        assert word in plan
    assert not run.exists()
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    assert kind_of(drafter.config) is PARALLEL and kind_of(start.config) is CAUSAL
    mask = drafter.config.pard_token
    assert f"mask: token {mask}, " in capsys.readouterr().out
    assert drafter.config.k == 3 and 0 <= mask < drafter.config.vocab_size
    assert not same_weights(drafter, start)
    log = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    validation = next(entry for entry in log if "mean_acceptance_length" in entry)
    assert validation["mean_acceptance_length"] >= 1
    assert all(0 < validation[f"acceptance/{slot}"] < 1 for slot in (1, 2, 3))
    assert exit_code(main, *arguments) == 0 and "is finished" in capsys.readouterr().out
    assert newest_run(tmp_path).recipe.drafter.k == 3

    quick = ["repeats=1", "warmup=0", "bootstrap=20", "baselines=[]"]
    quick.append("decode.sampling.max_new_tokens=8")
    others = [f"others={{start: {{drafter: {run / 'start'}}}, copied: {{drafter: max-gram}}}}"]
    assert exit_code(drafttrain, "eval", "--drafter", str(run), *quick, *others) == 0
    report = json.loads((run / "report.json").read_text())
    _, own, *_ = report["runs"]
    assert own["name"].startswith("parallel k=3")
    assert all(one["metrics"]["identical"]["value"] == 1.0 for one in report["runs"][1:])
    length = own["metrics"]["mean_acceptance_length"]["value"]
    assert length == pytest.approx(validation_of(log)["mean_acceptance_length"])
    forced = [*quick, "--mode", "teacher-forced", "--report", str(tmp_path / "forced.json")]
    assert exit_code(drafttrain, "eval", "--drafter", str(run), *forced) == 0
    found = json.loads((tmp_path / "forced.json").read_text())["runs"][-1]
    assert found["metrics"]["mean_acceptance_length"]["value"] == pytest.approx(length)

    text = ["--text", "w5 w6 w7", "--max-new-tokens", "5", "--drafter"]
    said = []
    for name in (str(run), "none"):
        target = ["--target", str(tmp_path / "target")]
        assert exit_code(drafttrain, "generate", *target, *text, name) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[0] == said[1]

    export(ExportConfig(drafter=str(run), out=tmp_path / "out"), reload=compare)
    assert "the target's output unchanged for 3 inputs" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["pard_token"], settings["k"], settings["model_type"]) == (mask, 3, "llama")
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"parallel_drafting": true' in card and "custom_generate" in card
    assert "SGLang" not in card and "SpecDrafter" not in card
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_but_undrafted(drafter, out)


def validation_of(log: list[dict]) -> dict:
    """The last validation of a run."""
    return [entry for entry in log if "mean_acceptance_length" in entry][-1]


def test_interrupted_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    arguments = make_project(tmp_path)
    resumed_as_if_never_stopped(main, arguments, tmp_path, "final", "start")
