"""The training benchmarks run end to end on tiny models."""

import json

from benchmarks import train
from tests.recipes.tiny_recipe import write_recipe
from tests.tiny_drafters import shared
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
    shares = {name: value for name, value in figures.items() if "share" in name}
    assert all(0 <= value <= 1 for value in shares.values())
    for name in ("glancing_share", "optimizer_share"):
        assert shares[name] > 0
    assert figures["step_ms"] > 0 and figures["real_share"] > 0.5
