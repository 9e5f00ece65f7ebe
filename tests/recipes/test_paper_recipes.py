"""The recipes with the paper's settings run two steps, with a tiny target of the same family and a
local sample of 200 rows."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.models.spec_drafter.build import depths
from drafttrain.models.spec_drafter.model import SpecDrafter
from recipes import train_spec_drafter
from tests.commanding import exit_code
from tests.recipes.tiny_recipe import write_texts
from tests.tiny_drafters import shared
from tests.tiny_targets import save_target

RECIPES = Path(__file__).parents[2] / "recipes"
ROWS = 200


@dataclass(frozen=True)
class Case:
    recipe: str
    family: str
    layers: tuple[int, int]
    copies: bool = False
    """Whether the encoder is initialised from the target's."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of sizes that a tiny target cannot have."""


TINY_T5 = ["drafter.overrides={d_model: 32, num_heads: 4, d_kv: 8, d_ff: 64}"]
CASES = [
    Case("spec_drafter_paper", "marian", (12, 2), copies=True),
    Case("wmt14_en_de", "marian", (12, 2)),
    Case("cnn_dm_bart", "bart", (12, 2), copies=True),
    Case("t5_wmt", "t5", (24, 6), overrides=[*TINY_T5, "train.precision=fp32"]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_recipe_of_the_paper_runs_on_a_sample(case, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    target = save_target(shared(case.family), tmp_path / "target")
    write_texts(tmp_path, ROWS, 5)
    config = RECIPES / f"{case.recipe}.yaml"
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
        *case.overrides,
    ]
    assert exit_code(train_spec_drafter.main, "--config", str(config), *local) == 0
    assert ("; 0 copied from the target" not in capsys.readouterr().out) == case.copies
    manifest = json.loads((tmp_path / "run" / "distilled" / "manifest.json").read_text())
    assert manifest["counts"]["ok"] == ROWS
    drafter = SpecDrafter.from_pretrained(tmp_path / "run" / "final")
    assert depths(drafter.config) == case.layers
    arguments = load_settings(SpecDrafterRecipe, config, local)
    assert drafter.config.k == arguments.drafter.k == 25
    assert drafter.shape.slots == "paper"
    assert arguments.train.average == 10
