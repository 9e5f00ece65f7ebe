"""Which targets a drafter may begin behind, and which recipes may train one; before weights."""

from __future__ import annotations

import copy

import datasets
import pytest

from drafttrain.build.drafters import check_for_target
from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.data.distill.recipe_rows import taught_rows
from drafttrain.export.parts import programs
from drafttrain.models.causal_recipe import check_causal_recipe
from drafttrain.models.draft_states import states_of
from drafttrain.models.drafters import check_fit, load_drafter_beside
from drafttrain.models.loading import check_target, load_target
from tests.tiny_drafters import behind_prompts
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

OTHERS = {
    "layers": ("llama", {"num_hidden_layers": 2}, r"prompt_layers = \[2, 3\].* layers 0 to 1"),
    "heads": ("llama", {"num_key_value_heads": 4}, "num_key_value_heads = 2, but .* has 4"),
    "width": ("llama", {"head_dim": 8}, "head_dim = 4, but .* has 8"),
    "family": ("qwen2", {}, "model_type = llama, but .* has qwen2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_target_whose_keys_and_values_are_other_ones_is_refused(name: str) -> None:
    family, changes, words = OTHERS[name]
    drafter = behind_prompts(tiny_model("llama", num_hidden_layers=4), [2, 3]).config
    other = tiny_model(family, **({"num_hidden_layers": 4} | changes)).config
    with pytest.raises(ConfigError, match=words):
        check_fit(drafter, other, "drafter 'd'", "target 't'")


def test_positions_that_turn_otherwise_are_refused() -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    drafter, other = behind_prompts(target, [2, 3]).config, copy.deepcopy(target.config)
    check_fit(drafter, other, "drafter 'd'", "target 't'")
    other.rope_parameters = other.rope_parameters | {"rope_theta": 5e5}
    with pytest.raises(ConfigError, match="rope_parameters = .* but target 't' has .*500000"):
        check_fit(drafter, other, "drafter 'd'", "target 't'")


def test_a_layer_of_its_own_without_one_of_the_targets_is_refused() -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    drafter = behind_prompts(target, [2, 3]).config
    drafter.prompt_layers = [3]
    with pytest.raises(ConfigError, match=r"prompt_layers = \[3\] .* for 2 layers of its own"):
        check_fit(drafter, target.config, "drafter 'd'", "target 't'")


def test_a_drafter_that_does_not_say_on_which_target_it_was_trained_is_refused(tmp_path) -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    save_target(target.float(), tmp_path / "TARGET")
    save_target(behind_prompts(target, [2, 3]).float(), tmp_path / "DRAFTER")
    asked = TargetConfig(path=str(tmp_path / "TARGET"))
    check_for_target(str(tmp_path / "DRAFTER"), asked, check_target(asked))
    with pytest.raises(ConfigError, match="does not say which target it was trained on"):
        load_drafter_beside(load_target(asked), str(tmp_path / "DRAFTER"))


def test_no_other_program_and_no_head_takes_one() -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    for k in (None, 4):
        config = behind_prompts(target, [2, 3], k).config
        assert programs(config) == ()
        with pytest.raises(ConfigError, match="shows no states .* drafter.prompt=own"):
            states_of(config)


WRONG = {
    "initialise.model={model_type: llama}": "gives random weights; leave initialise.model out",
    "initialise.path=TARGET": "was trained with drafter.prompt = 'own'.* give drafter.prompt=own",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_trained_is_refused_with_field_value_and_remedy(line, tmp_path) -> None:
    save_target(tiny_model("llama"), tmp_path / "TARGET")
    given = [f"run={tmp_path}/run", f"target.path={tmp_path}/TARGET", "data.path=rows.jsonl"]
    given += ["drafter.prompt=target", line.replace("TARGET", f"{tmp_path}/TARGET")]
    with pytest.raises(ConfigError, match=WRONG[line]):
        check_causal_recipe(load_settings(CausalDrafterRecipe, None, given))


def test_a_drafter_that_the_target_reads_prompts_for_starts_no_other(tmp_path) -> None:
    target = tiny_model("llama", num_hidden_layers=4)
    save_target(target, tmp_path / "TARGET")
    save_target(behind_prompts(target, [2, 3]), tmp_path / "DRAFTER")
    given = [f"run={tmp_path}/run", f"target.path={tmp_path}/TARGET", "data.path=rows.jsonl"]
    given += [f"initialise.path={tmp_path}/DRAFTER"]
    with pytest.raises(ConfigError, match="drafter.prompt = 'target', but .* 'own' here"):
        check_causal_recipe(load_settings(CausalDrafterRecipe, None, given))
    check_causal_recipe(load_settings(CausalDrafterRecipe, None, [*given, "drafter.prompt=target"]))


def test_outputs_of_one_token_teach_nothing_where_the_target_tells_it() -> None:
    columns = {"source_ids": [[5, 6]] * 3, "target_ids": [[7, 1], [1], [8, 9, 1]]}
    rows = datasets.Dataset.from_dict(columns)
    assert taught_rows(rows, True).tolist() == [0, 1, 2]
    assert taught_rows(rows, False).tolist() == [0, 2]
    with pytest.raises(ConfigError, match="all distilled outputs are single tokens"):
        taught_rows(rows.select([1]), False)
