"""Weights must be complete and finite, or are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, MarianMTModel, PreTrainedModel

import drafttrain
from drafttrain.build.pairs import drafter_for
from drafttrain.config.base import ConfigError
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.weight_files import check_finite, read_weights
from tests.export.pairs import make_head
from tests.tiny_drafters import tiny_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

Edit = Callable[[dict[str, Tensor]], object]


def edited(model: PreTrainedModel, folder: Path, edit: Edit) -> Path:
    """Saves the model to a folder and edits its weight file."""
    save_target(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def without(part: str) -> Edit:
    return lambda weights: [weights.pop(name) for name in list(weights) if part in name]


def with_value(part: str, value: float) -> Edit:
    return lambda weights: (
        next(weight for name, weight in weights.items() if part in name).flatten()[-1:].fill_(value)
    )


def with_more(name: str, *size: int) -> Edit:
    return lambda weights: weights.update({name: torch.ones(size)})


def with_a_prefix(weights: dict[str, Tensor]) -> None:
    for name in list(weights):
        weights[f"base.{name}"] = weights.pop(name)


INCOMPLETE: dict[str, tuple[Edit, str]] = {
    "a layer's part": (without("layers.1.mlp.up_proj"), "lack 1 of .*'model.layers.1.mlp.up_proj"),
    "embeddings": (without("embed_tokens"), "lack 1 of .*'model.embed_tokens"),
    "output": (without("lm_head"), "lack 1 of .*'lm_head"),
    "other names": (with_a_prefix, "lack .* hold 'base.lm_head.weight'"),
    "another shape": (
        with_more("model.norm.weight", 8),
        r"'model.norm.weight' has shape \[8\] .* \[16\]",
    ),
    "a bias that config.json denies": (
        with_more("model.layers.0.mlp.up_proj.bias", 32),
        "no 'model.layers.0.mlp.up_proj.bias'",
    ),
    "more layers than config.json has": (
        with_more("model.layers.2.mlp.up_proj.weight", 32, 16),
        "no 'model.layers.2",
    ),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_weights_that_are_not_those_of_config_json_are_refused(tmp_path, case):
    edit, says = INCOMPLETE[case]
    folder = edited(tiny_model("llama"), tmp_path / "model", edit)
    with pytest.raises(ConfigError, match=f"my model: .*{says}"):
        read_weights(LlamaForCausalLM, folder, "my model")
    with pytest.raises(ConfigError, match=says):  # loading by name has the same checks
        drafttrain.load(str(folder))


def test_tied_weights_lie_in_the_files_once_under_either_name(tmp_path):
    tied = tiny_model("marian", tie_word_embeddings=True)
    tied.tie_weights()
    tied.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    read = read_weights(MarianMTModel, tmp_path, "target", dtype=torch.float64)
    assert torch.equal(read.lm_head.weight, tied.lm_head.weight)
    folder = edited(tied, tmp_path / "none", without("shared"))
    with pytest.raises(ConfigError, match="lack"):
        read_weights(MarianMTModel, folder, "target")


def test_parts_that_a_language_model_does_not_have_are_left_out_and_reported(tmp_path, capsys):
    folder = edited(tiny_model("llama"), tmp_path, with_more("v_head.summary.weight", 1, 16))
    read_weights(LlamaForCausalLM, folder, "my model")
    warning = capsys.readouterr().err.splitlines()[-1]  # after Transformers' report
    assert warning.startswith("my model: 1 weights") and "'v_head.summary.weight'" in warning


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["embed_tokens", "layers.0.mlp.up_proj", "norm"])
def test_values_that_are_no_numbers_are_refused(tmp_path, part, value):
    folder = edited(tiny_model("llama"), tmp_path, with_value(part, value))
    with pytest.raises(ConfigError, match=f"my model: '.*{part}.*NaN or infinity"):
        read_weights(LlamaForCausalLM, folder, "my model")


def test_values_beyond_the_type_that_weights_are_read_in_are_refused(tmp_path):
    folder = edited(tiny_model("llama").float(), tmp_path, with_value("norm", 1e6))
    read_weights(LlamaForCausalLM, folder, "my model", dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"infinity in torch\.float16; .* bfloat16"):
        read_weights(LlamaForCausalLM, folder, "my model", dtype=torch.float16)


@pytest.mark.parametrize("edit", [without("bias"), with_value("weight", float("nan"))])
def test_drafters_of_our_own_kinds_and_heads_are_read_by_the_same_rule(tmp_path, edit):
    drafter = edited(tiny_drafter(), tmp_path / "drafter", edit)
    with pytest.raises(ConfigError, match="lack|NaN"):
        load_drafter(drafter, read_drafter_settings(str(drafter)))
    head = edited(make_head(tiny_model("llama")), tmp_path / "head", edit)
    with pytest.raises(ConfigError, match="lack|NaN"):
        load_heads(head)


def test_models_that_are_already_loaded_are_checked_too():
    target, drafter = tiny_model("llama"), tiny_model("llama", seed=2)
    drafter.lm_head.weight.data[3, 3] = torch.nan
    with pytest.raises(ConfigError, match="assistant_model .*'lm_head.weight'"):
        drafter_for(target, drafter, "assistant_model")
    with pytest.raises(ConfigError, match="'lm_head.weight'"):
        drafttrain.load(drafter, "none")


def test_eight_bit_weights_and_those_without_values_are_no_obstacle():
    check_finite(torch.nn.Linear(2, 2, device="meta"), "model")
    model = torch.nn.Linear(2, 2, bias=False).requires_grad_(False).to(torch.float8_e5m2)
    check_finite(model, "model")
    model.weight.data = torch.full((2, 2), torch.inf).to(torch.float8_e5m2)
    with pytest.raises(ConfigError, match="infinity"):
        check_finite(model, "model")
