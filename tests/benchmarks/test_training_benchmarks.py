"""The training benchmarks run end to end on tiny models."""

import gzip
import json
from pathlib import Path

import pytest
import yaml

from benchmarks import train
from tests.tiny_drafters import shared
from tests.tiny_targets import random_sentences, save_target


@pytest.fixture
def multi30k(tmp_path) -> Path:
    """A few sentences in files with Multi30k's names."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for name, count in (("train", 40), ("val", 4), ("test_2016_flickr", 4)):
        for language in ("en", "de"):
            text = "\n".join(random_sentences(count)) + "\n"
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_a_step_and_its_parts_are_measured_on_a_recipe(multi30k, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    target = save_target(shared("marian"), tmp_path / "target")
    recipe = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {"path": str(multi30k / "train.en.gz")},
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 4},
        "train": {"batch_tokens": 400, "threads": 1},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    out = tmp_path / "figures.json"
    train.main(["--config", str(tmp_path / "recipe.yaml"), "--steps", "2", "--out", str(out)])
    figures = json.loads(out.read_text())["figures"]
    shares = {name: value for name, value in figures.items() if "share" in name}
    assert all(0 <= value <= 1 for value in shares.values())
    for name in ("glancing_share", "optimizer_share"):
        assert shares[name] > 0
    assert figures["step_ms"] > 0 and figures["real_share"] > 0.5
