"""The recipe end to end on a tiny target: one command, resumed bit for bit, `eval`, `export`."""

import json

from transformers import AutoModelForCausalLM

from drafttrain.config.kinds import CAUSAL, PARALLEL, kind_of
from recipes.train_parallel_drafter import main
from tests.comparing import same_but_undrafted, same_weights
from tests.recipes.tiny_recipe import (
    decodes_as_validated,
    exported,
    language_project,
    trained_once,
)


def test_one_command_leaves_a_drafter_that_eval_generate_and_export_take(tmp_path, capsys):
    arguments, run = language_project(tmp_path, initialise={"layers": [0, 3]}), tmp_path / "run"
    printed = trained_once(main, arguments, run, capsys)
    drafter, start = (AutoModelForCausalLM.from_pretrained(run / n) for n in ("final", "start"))
    assert kind_of(drafter.config) is PARALLEL and kind_of(start.config) is CAUSAL
    mask = drafter.config.pard_token
    assert f"mask: token {mask}, " in printed
    assert drafter.config.k == 3 and 0 <= mask < drafter.config.vocab_size
    assert not same_weights(drafter, start)

    own = decodes_as_validated(run, capsys)
    assert own["name"].startswith("run k=3") and own["drafter"] == "parallel"
    assert all(0 < own["validation"][f"acceptance/{slot}"] < 1 for slot in (1, 2, 3))

    exported(run, capsys)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["pard_token"], settings["k"], settings["model_type"]) == (mask, 3, "llama")
    card = (tmp_path / "out" / "README.md").read_text()
    assert '"parallel_drafting": true' in card and "custom_generate" in card
    assert "SGLang" not in card and "SpecDrafter" not in card
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert same_but_undrafted(drafter, out)
