"""The recipe end to end on tiny targets: one command, resumed bit for bit, measured by `eval`."""

import json

import pytest

from drafttrain.models.block_heads import BlockHeads
from recipes.train_block_heads import main
from tests.commanding import ended
from tests.recipes.tiny_recipe import QUICK, trained_once, write_recipe
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target
from tests.training.tiny_runs import logged


@pytest.mark.parametrize("family", ["marian", "llama"])
def test_one_command_leaves_heads_that_eval_measures_as_exact(family, tmp_path, capsys):
    save_target(tiny_model(family).float(), tmp_path / "target")
    settings = {
        "distill": {"sampling": {"max_new_tokens": 12}, "shard_rows": 20},
        "drafter": {"k": 4},
        "train": {"max_steps": 6, "batch_tokens": 200, "checkpoint_every": 2, "threads": 1},
    }
    arguments = ["--config", str(write_recipe(tmp_path, 30, 6, **settings))]
    trained_once(main, arguments, tmp_path / "run", capsys)
    heads = BlockHeads.from_pretrained(tmp_path / "run" / "final")
    assert (heads.config.k, heads.config.hidden_size, heads.config.ffn_size) == (4, 16, 16)
    assert heads.config.is_encoder_decoder == (family == "marian")
    assert heads.outer_weight.abs().max() > 0  # initially 0
    assert logged(tmp_path / "run", "mean_acceptance_length")[0] >= 1
    assert logged(tmp_path / "run", "held_out_loss")[0] > 0
    assert ended("eval", "--drafter", tmp_path / "run", *QUICK) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["runs"][1]["name"] == "run k=4 greedy"
    assert report["runs"][1]["metrics"]["identical"]["value"] == 1.0
