"""Drafters whose prompt the target reads, end to end: trained, resumed, measured, not exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from drafttrain.cli import main as drafttrain
from recipes import train_causal_drafter, train_parallel_drafter
from tests.comparing import same_weights
from tests.recipes.tiny_recipe import (
    decodes_as_validated,
    exit_code,
    forced_length,
    language_project,
)
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

RECIPES = {"token by token": train_causal_drafter.main, "blocks": train_parallel_drafter.main}


def make_project(folder: Path) -> list[str]:
    return language_project(folder, drafter={"prompt": "target"}, initialise={"layers": [2, 3]})


@pytest.mark.parametrize("main", RECIPES.values(), ids=RECIPES.keys())
def test_one_command_leaves_a_drafter_that_eval_and_generate_take(
    main: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arguments, run = make_project(tmp_path), tmp_path / "run"
    assert exit_code(main, *arguments) == 0, capsys.readouterr().err
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    assert drafter.config.prompt_layers == start.config.prompt_layers == [2, 3]
    assert not same_weights(drafter, start)

    decodes_as_validated(run, capsys)
    assert forced_length(run, "decode.sampling.temperature=1") >= 1

    refused = [f"out={tmp_path / 'out'}", "--drafter", str(run)]
    assert exit_code(drafttrain, "export", *refused) != 0
    assert "keys and values of the prompt" in capsys.readouterr().err
    save_target(tiny_model("llama", seed=9, num_hidden_layers=4).float(), tmp_path / "other")
    given = ["--target", str(tmp_path / "other"), "--text", "w5", "--drafter", str(run)]
    assert exit_code(drafttrain, "generate", *given) != 0
    assert "other weights than the target given" in capsys.readouterr().err
