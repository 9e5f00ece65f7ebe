"""The recipes with the paper's settings run two steps; those for new users need three settings."""

import json
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import CausalDrafterRecipe, SpecDrafterRecipe
from drafttrain.config.runs import newest_run
from drafttrain.models.spec_drafter.build import depths
from drafttrain.models.spec_drafter.model import SpecDrafter
from recipes import train_spec_drafter
from tests.commanding import exit_code
from tests.recipes.tiny_recipe import write_texts
from tests.tiny_drafters import shared
from tests.tiny_targets import save_target

RECIPES = Path(__file__).parents[2] / "recipes"
ROWS = 24
TINY_T5 = ["drafter.overrides={d_model: 32, num_heads: 4, d_kv: 8, d_ff: 64}"]
"""Sizes that a tiny target cannot have."""


@pytest.mark.parametrize(
    ("recipe", "family", "layers", "copies", "overrides"),
    [
        ("spec_drafter_paper", "marian", (12, 2), True, []),
        ("wmt14_en_de", "marian", (12, 2), False, []),
        ("cnn_dm_bart", "bart", (12, 2), True, []),
        ("t5_wmt", "t5", (24, 6), False, [*TINY_T5, "train.precision=fp32"]),
    ],
)
def test_recipe_of_the_paper_runs_on_a_sample(
    recipe, family, layers, copies, overrides, tmp_path, capsys
):
    """copies: whether the encoder is initialised from the target's."""
    target = save_target(shared(family), tmp_path / "target")
    write_texts(tmp_path, ROWS, 2)
    config = RECIPES / f"{recipe}.yaml"
    local = [
        f"run={tmp_path / 'run'}",
        f"target={{path: {target}}}",
        f"data={{path: {tmp_path / 'train.txt'}}}",
        f"held_out={{path: {tmp_path / 'val.txt'}}}",
        "distill.sampling.max_new_tokens=8",
        "train.max_steps=2",
        "train.accumulation=1",
        "train.checkpoint_every=1",
        "train.threads=1",
        *overrides,
    ]
    assert exit_code(train_spec_drafter.main, "--config", str(config), *local) == 0
    assert ("; 0 copied from the target" not in capsys.readouterr().out) == copies
    manifest = json.loads((tmp_path / "run" / "distilled" / "manifest.json").read_text())
    assert manifest["counts"]["ok"] == ROWS
    drafter = SpecDrafter.from_pretrained(tmp_path / "run" / "final")
    assert depths(drafter.config) == layers
    arguments = load_settings(SpecDrafterRecipe, config, local)
    assert drafter.config.k == arguments.drafter.k == 25
    assert drafter.shape.slots == "paper"
    assert arguments.train.average == 10


@pytest.mark.parametrize(
    ("name", "kind", "tutorial"),
    [
        ("seq2seq", SpecDrafterRecipe, "docs/tutorial-seq2seq.md"),
        ("causal", CausalDrafterRecipe, "docs/tutorial-decoder-only.md"),
    ],
)
def test_starting_recipes_lack_a_target_inputs_and_a_folder_and_are_named(
    name, kind, tutorial, tmp_path
):
    recipe, given = RECIPES / f"{name}.yaml", ["target.path=t", "data.path=d.txt", "run=r"]
    settings = load_settings(kind, recipe, given)
    assert settings.held_out is None and settings.data.input_column is None
    for left_out in given:
        with pytest.raises(ConfigError, match=left_out.partition("=")[0].partition(".")[0]):
            load_settings(kind, recipe, [one for one in given if one != left_out])
    for page in ("README.md", tutorial):
        assert f"recipes/{name}.yaml" in (RECIPES.parent / page).read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=f"recipes/{name}.yaml"):
        newest_run(tmp_path)
