"""Drafters whose prompt the target reads, end to end: trained, resumed, measured, not exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from drafttrain.cli import main as drafttrain
from recipes import train_causal_drafter, train_parallel_drafter
from tests.comparing import same_weights
from tests.recipes.tiny_recipe import (
    QUICK,
    exit_code,
    forced_length,
    generates_what_plain_decoding_does,
    write_recipe,
)
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

RECIPES = {"token by token": train_causal_drafter.main, "blocks": train_parallel_drafter.main}


def make_project(folder: Path) -> list[str]:
    """A target of four layers whose last two are copied, and 6 steps with a checkpoint every 2."""
    save_target(tiny_model("llama", num_hidden_layers=4).float(), folder / "target")
    settings = {
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 3, "output_tokens": 12, "prompt": "target"},
        "initialise": {"layers": [2, 3]},
        "objective": {"cross_entropy": 0.5, "packed_tokens": 60},
        "train": {"max_steps": 6, "batch_tokens": 90, "checkpoint_every": 2, "threads": 1},
    }
    return ["--config", str(write_recipe(folder, 8, 3, **settings))]


@pytest.mark.parametrize("main", RECIPES.values(), ids=RECIPES.keys())
def test_one_command_leaves_a_drafter_that_eval_and_generate_take(
    main: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments, run = make_project(tmp_path), tmp_path / "run"
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    assert drafter.config.prompt_layers == start.config.prompt_layers == [2, 3]
    assert not same_weights(drafter, start)
    log = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    validation = [entry for entry in log if "mean_acceptance_length" in entry][-1]

    others = [f"others={{start: {{drafter: {run / 'start'}}}}}"]
    assert exit_code(drafttrain, "eval", "--drafter", str(run), *QUICK, *others) == 0
    runs = json.loads((run / "report.json").read_text())["runs"]
    assert all(one["metrics"]["identical"]["value"] == 1.0 for one in runs[1:])
    length = runs[1]["metrics"]["mean_acceptance_length"]["value"]
    assert length == pytest.approx(validation["mean_acceptance_length"])
    assert forced_length(run) == pytest.approx(length)
    assert forced_length(run, "decode.sampling.temperature=1") >= 1
    generates_what_plain_decoding_does(run, tmp_path / "target", capsys)

    refused = [f"out={tmp_path / 'out'}", "--drafter", str(run)]
    assert exit_code(drafttrain, "export", *refused) != 0
    assert "keys and values of the prompt" in capsys.readouterr().err
    save_target(tiny_model("llama", seed=9, num_hidden_layers=4).float(), tmp_path / "other")
    given = ["--target", str(tmp_path / "other"), "--text", "w5", "--drafter", str(run)]
    assert exit_code(drafttrain, "generate", *given) != 0
    assert "other weights than the target given" in capsys.readouterr().err
