"""The benchmarks of training run from end to end on tiny models."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import yaml

from benchmarks import paper_sizes, train
from drafttrain.config.commands import EvalConfig
from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import SpecDrafterRecipe, TargetRecipe
from tests.tiny_drafters import shared
from tests.tiny_targets import random_sentences, save_target


@pytest.fixture
def multi30k(tmp_path: Path) -> Path:
    """A few sentences under the names of Multi30k's files."""
    folder = tmp_path / "multi30k"
    folder.mkdir()
    for name, count in (("train", 40), ("val", 4), ("test_2016_flickr", 4)):
        for language in ("en", "de"):
            text = "\n".join(random_sentences(count)) + "\n"
            (folder / f"{name}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_a_step_and_its_parts_are_measured_on_a_recipe(
    multi30k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_paper_sizes_are_what_the_commands_ask_for(tmp_path: Path) -> None:
    given = paper_sizes.parse_arguments(["--data", "multi30k", "--out", str(tmp_path)])
    stages = paper_sizes.stages(given)
    target = load_settings(TargetRecipe, None, overrides_of(stages["target"][0]))
    assert (target.model["encoder_layers"], target.model["decoder_layers"]) == (6, 6)
    assert target.model["d_model"] == 512
    drafter = load_settings(SpecDrafterRecipe, None, overrides_of(stages["drafter"][0]))
    shape = drafter.drafter
    assert (shape.encoder_layers, shape.decoder_layers, shape.k) == (12, 2, 25)
    decoding = [load_settings(EvalConfig, None, overrides_of(one)) for one in stages["eval"]]
    assert [one.target.dtype for one in decoding] == ["float32", "bfloat16"]
    assert all(one.sweep == {"beta": [3], "tau": [1.0]} for one in decoding)


def overrides_of(command: list[str]) -> list[str]:
    return [part for part in command if "=" in part]
