"""The recipe end to end on tiny targets: one command, resumed bit for bit, measured by `eval`."""

import json
from pathlib import Path

import pytest

from drafttrain.cli import main as drafttrain
from drafttrain.config.runs import newest_run
from drafttrain.models.block_heads import BlockHeads
from recipes.train_block_heads import main
from tests.recipes.tiny_recipe import QUICK, exit_code, plans_and_writes_nothing, write_recipe
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def make_project(folder: Path, family: str) -> list[str]:
    """Makes a target, 30 inputs and 6 held-out inputs, and returns the arguments of a run of 6
    steps with a checkpoint every 2."""
    save_target(tiny_model(family).float(), folder / "target")
    file = write_recipe(
        folder,
        30,
        6,
        distill={"sampling": {"max_new_tokens": 12}, "shard_rows": 20},
        drafter={"k": 4},
        train={"max_steps": 6, "batch_tokens": 200, "checkpoint_every": 2, "threads": 1},
    )
    return ["--config", str(file)]


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_one_command_leaves_heads_that_eval_measures_as_exact(family, tmp_path, capsys):
    arguments = make_project(tmp_path, family)
    plans_and_writes_nothing(main, arguments, tmp_path / "run", capsys)
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    heads = BlockHeads.from_pretrained(tmp_path / "run" / "final")
    assert (heads.config.k, heads.config.hidden_size, heads.config.ffn_size) == (4, 16, 16)
    assert heads.config.is_encoder_decoder == (family == "marian")
    assert heads.outer_weight.abs().max() > 0  # initially 0
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    validation = next(entry for entry in log if "mean_acceptance_length" in entry)
    assert validation["mean_acceptance_length"] >= 1 and validation["held_out_loss"] > 0
    assert exit_code(main, *arguments) == 0 and "is finished" in capsys.readouterr().out
    assert newest_run(tmp_path).recipe.drafter.k == 4
    assert exit_code(drafttrain, "eval", "--drafter", str(tmp_path / "run"), *QUICK) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["runs"][1]["name"] == "run k=4 greedy"
    assert report["runs"][1]["metrics"]["identical"]["value"] == 1.0
