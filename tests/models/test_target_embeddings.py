"""Drafters whose folder has all weights except the embeddings, which are their target's."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from drafttrain.build.pairs import drafter_for
from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.recipes import CausalDrafterRecipe
from drafttrain.models.causal_drafter import start_drafter
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.loading import LoadedTarget, load_target
from drafttrain.training.run_folder import save_final
from tests.comparing import close, same_weights
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target, tiny_tokenizer

IDS = torch.tensor([[5, 6, 7, 8]])
THEIRS = {"model.embed_tokens.weight", "lm_head.weight"}


def recipe(folder: Path, **groups: object) -> CausalDrafterRecipe:
    places = {"run": "run", "target": {"path": str(folder)}, "data": {"path": "rows.jsonl"}}
    shape = {"layers": 2, "embeddings": "target"}
    return CausalDrafterRecipe.model_validate(places | {"drafter": shape} | groups)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folders(request, tmp_path) -> tuple[Path, Path]:
    """A target, and a drafter of two of its layers without embeddings."""
    tied = {"tie_word_embeddings": request.param}
    target = tiny_model("llama", num_hidden_layers=3, **tied).float()
    if request.param:
        target.lm_head.weight = target.model.embed_tokens.weight
    save_target(target, tmp_path / "target")
    drafter = start_drafter(recipe(tmp_path / "target"), target)
    drafter.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "target")  # has the same tensor names
    assert THEIRS <= {*whole.state_dict()}
    return tmp_path / "target", save_final(tmp_path / "run", drafter, tiny_tokenizer())


def loaded(target: Path) -> LoadedTarget:
    return load_target(TargetConfig(path=str(target)))


def drafter_of(folder: Path, target: LoadedTarget | None) -> PreTrainedModel:
    return load_drafter(folder, read_drafter_settings(str(folder)), target)


def test_its_folder_has_only_layers_and_it_shares_the_loaded_targets_modules(folders, tmp_path):
    target, final = folders
    names, theirs = (set(load_file(one / "model.safetensors")) for one in (final, target))
    assert not names & THEIRS and "model.layers.1.mlp.up_proj.weight" in names
    assert "model.embed_tokens.weight" in theirs
    assert json.loads((final / "config.json").read_text())["embeddings"] == "target"
    loaded_target, alone = loaded(target), drafter_of(final, None)
    drafter = drafter_of(final, loaded_target)
    assert drafter.get_input_embeddings() is loaded_target.model.get_input_embeddings()
    assert drafter.get_output_embeddings() is loaded_target.model.get_output_embeddings()
    close(drafter(IDS).logits.double(), alone(IDS).logits.double(), 1e-5)
    stock = start_drafter(recipe(target), loaded_target.model)
    assert not torch.allclose(stock(IDS).logits, alone(IDS).logits)
    drafter.save_pretrained(tmp_path / "out")  # saved again it is whole
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not hasattr(out.config, "embeddings") and same_weights(out, alone)
    half = load_target(TargetConfig(path=str(target), dtype="bfloat16"))  # is the same target
    assert drafter_of(final, half).dtype == torch.bfloat16


def test_loading_it_warns_of_nothing(folders, monkeypatch):
    warned = []
    monkeypatch.setattr(logging.getLogger("transformers").handlers[0], "emit", warned.append)
    level = transformers_logging.get_verbosity()
    drafter_of(folders[1], loaded(folders[0]))
    assert [one.getMessage() for one in warned] == []
    assert transformers_logging.get_verbosity() == level


def test_training_continues_from_it_with_separate_embeddings(folders):
    target, final = folders
    loaded_target = loaded(target).model
    settings = recipe(target, initialise={"path": str(final)})
    drafter = start_drafter(settings, loaded_target)
    assert drafter.get_input_embeddings() is not loaded_target.get_input_embeddings()
    close(drafter(IDS).logits.double(), drafter_of(final, None)(IDS).logits.double(), 1e-5)
    tied = drafter.lm_head.weight is drafter.model.embed_tokens.weight
    assert tied == drafter.config.tie_word_embeddings


def test_embeddings_of_a_sibling_are_taken_as_they_are(folders):
    target, final = folders
    model = AutoModelForCausalLM.from_pretrained(target)
    changed = model.get_input_embeddings().weight
    changed.data[3] += 1.0
    model.save_pretrained(target)
    for given in (None, loaded(target)):
        assert torch.equal(drafter_of(final, given).get_input_embeddings().weight, changed)


def test_embeddings_of_another_shape_are_refused(folders, tmp_path):
    _, final = folders
    wide = save_target(tiny_model("llama", hidden_size=32).float(), tmp_path / "wide")
    with pytest.raises(ConfigError, match="of shape .* those of the given target have shape"):
        drafter_of(final, loaded(wide))


def test_a_missing_target_and_missing_layers_are_named(folders):
    target, final = folders
    moved = target.rename(target.with_name("moved"))
    with pytest.raises(ConfigError, match=r"shares the embeddings of target .*target\.path"):
        drafter_of(final, None)
    moved.rename(target)
    cases = (
        (target, "model.embed_tokens.weight", "cannot be read .*"),
        (final, "model.layers.1.mlp.up_proj.weight", "lack 1 of .*"),
    )
    for folder, name, says in cases:
        edit(folder, lambda weights, name=name: weights.pop(name))
        with pytest.raises(ConfigError, match=says + name):
            drafter_of(final, None)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the weights in a folder's file in place."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_names_of_a_target_without_its_base_models_prefix_are_read_after_exact_names(folders):
    target, final = folders
    expected, file = drafter_of(final, loaded(target)), target / "model.safetensors"
    weights = load_file(file)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    wrong = {name: value + 1.0 for name, value in bare.items()}
    for stored in (wrong | weights, bare):
        save_file(stored, file, metadata={"format": "pt"})
        assert same_weights(drafter_of(final, None), expected)
    file.rename(target / "part.safetensors")
    index = {"weight_map": dict.fromkeys(bare, "part.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_weights(drafter_of(final, None), expected)


def test_an_index_of_the_target_names_files_of_its_own_folder_only(folders):
    target, final = folders
    (target / "model.safetensors").rename(target.parent / "model.safetensors")
    index = {"weight_map": dict.fromkeys(THEIRS, "../model.safetensors")}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names '\.\./model\.safetensors', which is not"):
        drafter_of(final, None)


def test_the_family_class_loads_it_without_drafting(folders):
    target, final = folders
    torn = AutoModelForCausalLM.from_pretrained(final)
    with pytest.raises(ConfigError, match="loaded without its embeddings.*drafttrain export"):
        drafter_for(loaded(target).model, torn, "assistant_model")
