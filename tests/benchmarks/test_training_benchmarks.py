"""Benchmarks that train: the parts of a step are measured, a shallow target grows to a deep one."""

import json

import pytest
import torch

from benchmarks import train
from benchmarks.grow_target import grow, main
from tests.recipes.tiny_recipe import write_recipe
from tests.tiny_drafters import shared
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


def test_a_step_and_its_parts_are_measured_on_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    save_target(shared("marian"), tmp_path / "target")
    settings = {
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 4},
        "train": {"batch_tokens": 400, "threads": 1},
    }
    recipe, out = write_recipe(tmp_path, 40, 4, **settings), tmp_path / "figures.json"
    train.main(["--config", str(recipe), "--steps", "2", "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    assert all(0 <= value <= 1 for name, value in figures.items() if "share" in name)
    assert figures["glancing_share"] > 0 and figures["optimizer_share"] > 0
    assert figures["step_ms"] > 0 and figures["real_share"] > 0.5


def test_layers_are_repeated_and_all_else_is_kept():
    base = tiny_model("marian", encoder_layers=2, decoder_layers=1)
    deep = grow(base)
    weights, own = base.state_dict(), deep.state_dict()
    assert (deep.config.encoder_layers, deep.config.decoder_layers) == (4, 2)
    assert (base.config.encoder_layers, base.config.decoder_layers) == (2, 1)
    assert torch.equal(own["model.shared.weight"], weights["model.shared.weight"])
    for part, sources in (("encoder", (0, 0, 1, 1)), ("decoder", (0, 0))):
        for layer, source in enumerate(sources):
            name = f"model.{part}.layers.{{}}.fc1.weight"
            assert torch.equal(own[name.format(layer)], weights[name.format(source)])
    assert deep.generate(torch.tensor([[5, 6, 1]]), max_new_tokens=3).shape[0] == 1


def test_a_base_of_another_kind_is_refused(tmp_path, capsys):
    base = save_target(tiny_model("t5"), tmp_path / "t5")
    with pytest.raises(SystemExit):
        main(["--base", str(base), "--config", "none.yaml"])
    assert "not built like Marian or BART" in capsys.readouterr().err
