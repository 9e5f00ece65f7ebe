"""The recipes for new users need only a target, inputs and a folder."""

from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import CausalDrafterRecipe, SpecDrafterRecipe
from drafttrain.config.runs import newest_run

ROOT = Path(__file__).parents[2]
STARTS = {"recipes/seq2seq.yaml": SpecDrafterRecipe, "recipes/causal.yaml": CausalDrafterRecipe}
TUTORIALS = {
    "recipes/seq2seq.yaml": "docs/tutorial-seq2seq.md",
    "recipes/causal.yaml": "docs/tutorial-decoder-only.md",
}


@pytest.mark.parametrize("recipe", STARTS)
def test_target_inputs_and_folder_are_all_that_is_missing(recipe):
    given = {"target.path": "org/target", "data.path": "mine.txt", "run": "checkpoints/mine"}
    settings = load_settings(STARTS[recipe], ROOT / recipe, [f"{k}={v}" for k, v in given.items()])
    assert settings.held_out is None and settings.data.input_column is None
    for left_out in given:
        words = [f"{name}={value}" for name, value in given.items() if name != left_out]
        with pytest.raises(ConfigError, match=left_out.partition(".")[0]):
            load_settings(STARTS[recipe], ROOT / recipe, words)


@pytest.mark.parametrize("recipe", STARTS)
def test_readme_tutorials_and_errors_name_them(recipe, tmp_path):
    for page in ("README.md", TUTORIALS[recipe]):
        assert recipe in (ROOT / page).read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=recipe):
        newest_run(tmp_path)
