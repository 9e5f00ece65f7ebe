"""The recipe end to end on a tiny target: one command, resumed bit for bit, `eval`, `export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from drafttrain.cli import main as drafttrain
from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.config.kinds import CAUSAL, PARALLEL, kind_of
from drafttrain.config.runs import newest_run
from drafttrain.export.verify import compare
from recipes.train_parallel_drafter import main
from tests.comparing import same_but_undrafted, same_weights
from tests.recipes.tiny_recipe import (
    QUICK,
    exit_code,
    forced_length,
    generates_what_plain_decoding_does,
    plans_and_writes_nothing,
    write_recipe,
)
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def make_project(folder: Path) -> list[str]:
    """A target of four layers, 8 prompts and 3 held-out ones, and 6 steps with a checkpoint every
    2: arguments."""
    save_target(tiny_model("llama", num_hidden_layers=4).float(), folder / "target")
    settings = {
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 3, "output_tokens": 12},
        "initialise": {"layers": [0, 3]},
        "objective": {"cross_entropy": 0.5, "packed_tokens": 60},
        "train": {"max_steps": 6, "batch_tokens": 90, "checkpoint_every": 2, "threads": 1},
    }
    return ["--config", str(write_recipe(folder, 8, 3, **settings))]


def test_one_command_leaves_a_drafter_that_eval_generate_and_export_take(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments, run = make_project(tmp_path), tmp_path / "run"
    plans_and_writes_nothing(main, arguments, run, capsys)
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    assert kind_of(drafter.config) is PARALLEL and kind_of(start.config) is CAUSAL
    mask = drafter.config.pard_token
    assert f"mask: token {mask}, " in capsys.readouterr().out
    assert drafter.config.k == 3 and 0 <= mask < drafter.config.vocab_size
    assert not same_weights(drafter, start)
    log = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    validation = [entry for entry in log if "mean_acceptance_length" in entry][-1]
    assert all(0 < validation[f"acceptance/{slot}"] < 1 for slot in (1, 2, 3))
    assert exit_code(main, *arguments) == 0 and "is finished" in capsys.readouterr().out
    assert newest_run(tmp_path).recipe.drafter.k == 3

    others = [f"others={{start: {{drafter: {run / 'start'}}}, copied: {{drafter: max-gram}}}}"]
    assert exit_code(drafttrain, "eval", "--drafter", str(run), *QUICK, *others) == 0
    report = json.loads((run / "report.json").read_text())
    _, own, *_ = report["runs"]
    assert own["name"].startswith("parallel k=3")
    assert all(one["metrics"]["identical"]["value"] == 1.0 for one in report["runs"][1:])
    length = own["metrics"]["mean_acceptance_length"]["value"]
    assert length == pytest.approx(validation["mean_acceptance_length"])
    assert forced_length(run) == pytest.approx(length)

    generates_what_plain_decoding_does(run, tmp_path / "target", capsys)

    export(ExportConfig(drafter=str(run), out=tmp_path / "out"), reload=compare)
    assert "the target's output unchanged for 3 inputs" in capsys.readouterr().out
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["pard_token"], settings["k"], settings["model_type"]) == (mask, 3, "llama")
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"parallel_drafting": true' in card and "custom_generate" in card
    assert "SGLang" not in card and "SpecDrafter" not in card
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_but_undrafted(drafter, out)
