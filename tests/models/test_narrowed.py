"""The target's layers in a narrower stream: a rotation changes nothing, and rows are by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.language_recipes import CausalDrafterRecipe
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.models.causal_drafter import start_drafter
from drafttrain.models.causal_recipe import check_causal_recipe
from drafttrain.models.narrowed import (
    NARROWED,
    Projection,
    check_width,
    choose_directions,
    narrow_config,
    narrow_weights,
)
from tests.comparing import close, same_weights
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

IDS = torch.tensor([[5, 6, 7, 8, 30]])
BIASED = {"attention_bias": True, "mlp_bias": True}


def with_gains(family: str, **changes: object) -> PreTrainedModel:
    """A tiny model whose norms and biases are no longer ones and noughts."""
    model = tiny_model(family, **changes)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def logits(model: PreTrainedModel) -> Tensor:
    """What it says in float64 throughout: the families' own norms round to float32."""
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    for norm in norms:
        own = {"weight": norm.weight, "eps": norm.variance_epsilon}
        norm.forward = partial(F.rms_norm, normalized_shape=norm.weight.shape, **own)
    return model(IDS).logits


def narrow(target: PreTrainedModel, projection: Projection) -> PreTrainedModel:
    config = narrow_config(target.config, projection.directions.shape[1])
    model = type(target)(config).double().eval()
    model.load_state_dict(narrow_weights(target.state_dict(), projection))
    return model


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in NARROWED), ("llama", BIASED)], ids=str
)
def test_all_directions_leave_what_the_target_says(family: str, changes: dict) -> None:
    target = with_gains(family, **changes)
    projection = choose_directions(target, 16)
    assert abs(projection.scale - 1.0) < 1e-12
    found = narrow(target, projection)
    assert (logits(found) - logits(target)).abs().max() <= 1e-10
    assert not torch.allclose(found.model.embed_tokens.weight, target.model.embed_tokens.weight)


def test_a_target_that_lives_in_few_directions_is_the_same_in_these_alone() -> None:
    """All that is written to the stream is within P: nothing is lost, and c is 1."""
    target = with_gains("llama")
    within, _ = torch.linalg.qr(torch.randn(16, 8, dtype=torch.float64))
    for layer in target.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data = within @ within.T @ linear.weight.data
    target.model.embed_tokens.weight.data @= within @ within.T
    target.lm_head.weight.data @= within @ within.T
    target.model.norm.weight.data.fill_(1.7)
    target.config.rms_norm_eps = 1e-12
    for module in target.modules():
        if "RMSNorm" in type(module).__name__:
            module.variance_epsilon = 1e-12
    projection = choose_directions(target, 8)
    assert abs(projection.share - 1.0) < 1e-12 and abs(projection.scale - 2**0.5) < 1e-12
    assert (logits(narrow(target, projection)) - logits(target)).abs().max() <= 1e-8


def test_directions_are_the_largest_of_both_tables_by_hand() -> None:
    """Energies along the axes: 1, 1/2 + 0, 0 + 1/2, 0; the share of the first three is all."""
    target = tiny_model("llama", hidden_size=4, num_attention_heads=2, num_key_value_heads=1)
    for layer, second in ((target.model.embed_tokens, 1), (target.lm_head, 2)):
        layer.weight.data.zero_()
        layer.weight.data[0, 0] = layer.weight.data[1, second] = 3.0
    one = choose_directions(target, 1)
    close(one.directions.abs(), torch.tensor([[1.0], [0.0], [0.0], [0.0]]).double())
    assert abs(one.share - 0.5) < 1e-12 and abs(one.scale - 2**0.5) < 1e-12
    assert abs(choose_directions(target, 3).share - 1.0) < 1e-12
    with pytest.raises(ValueError, match="5 directions of 4"):
        choose_directions(target, 5)


@pytest.mark.parametrize("family", NARROWED)
def test_a_narrow_drafter_is_a_plain_model_that_the_engine_runs(
    family: str, tmp_path: Path
) -> None:
    target = with_gains(family, num_hidden_layers=3)
    settings = recipe({"width": 8, "layers": [0, 2]})
    drafter = start_drafter(settings, target)
    drafter.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(again) is type(target) and same_weights(drafter, again)
    config = again.config
    assert (config.hidden_size, config.head_dim, config.num_hidden_layers) == (8, 4, 2)
    assert again.lm_head.weight is not again.model.embed_tokens.weight
    assert drafter.num_parameters() < target.num_parameters()
    cached, source = CachedModel(again), make_source(IDS[0], again)
    found = cached.catch_up(cached.encode(source), source.prefix).logits
    close(found, again(IDS).logits[0, -1:], 1e-4)


def recipe(initialise: dict, **groups: object) -> CausalDrafterRecipe:
    places = {"run": "run", "target": {"path": "TARGET"}, "data": {"path": "rows.jsonl"}}
    return CausalDrafterRecipe.model_validate(places | {"initialise": initialise} | groups)


@pytest.mark.parametrize(
    ("family", "initialise", "groups", "says"),
    [
        ("gpt2", {"width": 8}, {}, "initialise.width = 8 .*'gpt2' model; leave it out"),
        ("llama", {"width": 20}, {}, "initialise.width = 20 is more than .* 16; give"),
        ("llama", {"width": 8, "path": "a"}, {}, "initialise.width = 8 .* initialise.path"),
        ("llama", {"width": 8, "model": {}}, {}, "initialise.width = 8 .* initialise.model"),
        ("llama", {"width": 8}, {"drafter": {"prompt": "target"}}, "drafter.prompt = 'target'"),
        ("llama", {"width": 8}, {"drafter": {"embeddings": "target"}}, "embeddings = 'target'"),
    ],
)
def test_what_cannot_be_narrowed_is_refused(family, initialise, groups, says, tmp_path) -> None:
    save_target(tiny_model(family), tmp_path)
    with pytest.raises(ConfigError, match=says):
        check_causal_recipe(recipe(initialise, target={"path": str(tmp_path)}, **groups))


def test_widths_that_the_family_refuses_name_the_heads() -> None:
    check_width(12, tiny_model("llama").config)
    with pytest.raises(ConfigError, match="initialise.width = 10: .*multiple of the target's 4"):
        check_width(10, tiny_model("llama").config)
