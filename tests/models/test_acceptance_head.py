"""Acceptance heads: the formula, separate weights in every block, and their folders."""

import json

import pytest
import torch
from transformers import AutoModel

from drafttrain.config.base import ConfigError
from drafttrain.models.acceptance_head import (
    AcceptanceHead,
    AcceptanceHeadConfig,
    load_heads,
    quick_judge,
)
from tests.comparing import close, same_weights
from tests.tiny_models import tiny_model


def make_head(depth: int = 3, weight: float = 6.0, hidden_size: int = 8) -> AcceptanceHead:
    torch.manual_seed(depth)
    config = AcceptanceHeadConfig(hidden_size=hidden_size, depth=depth, rejection_weight=weight)
    return AcceptanceHead(config).eval()


def test_every_block_has_weights_of_its_own():
    """The original's Linear(h, 2) has 234 weights at h = 8 and D = 3 (with shared blocks only 90).

    One output instead of two saves 8 weights and a bias: 225.
    """
    head = make_head(depth=3)
    assert head.num_parameters() + 8 + 1 == 234
    assert len({block.weight.data_ptr() for block in head.blocks}) == 3
    assert not torch.equal(head.blocks[0].weight, head.blocks[1].weight)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_logits_follow_the_formula_for_many_states_and_for_one(depth):
    head = make_head(depth)
    x = torch.randn(2, 5, 8)
    expected = x
    for block in head.blocks:
        inner = expected @ block.weight.T + block.bias
        expected = expected + inner * torch.sigmoid(inner)
    expected = (expected @ head.out.weight.T + head.out.bias)[..., 0]
    assert head(x).shape == (2, 5)
    assert (head(x) - expected).abs().max() < 1e-5
    close(head.acceptance(x), torch.sigmoid(head(x)), 1e-6)
    half = head(x.half())  # read in float32
    assert half.dtype == torch.float32
    close(half, head(x.half().float()), 1e-6)
    judge, states = quick_judge(head), x[0]
    one_by_one = [judge(state) for state in states]
    assert one_by_one == pytest.approx(head.acceptance(states).tolist(), abs=1e-6)
    assert judge(states[0].half()) == pytest.approx(half[0, 0].sigmoid().item(), abs=1e-6)


def test_saved_head_loads_alone_in_a_sweep_and_in_a_run(tmp_path):
    heads = [make_head(0, 1.0), make_head(3, 6.0), make_head(1, 0.5)]
    for head in heads:
        head.save_pretrained(tmp_path / "final" / head.config.name)
    for folder in (tmp_path, tmp_path / "final"):
        loaded = load_heads(folder)
        assert set(loaded) == {"D0-w1", "D3-w6", "D1-w0.5"}
    for head in heads:
        alone = load_heads(tmp_path / "final" / head.config.name)
        assert list(alone) == [head.config.name]
        assert same_weights(alone[head.config.name], head)
        assert not alone[head.config.name].training
    assert isinstance(AutoModel.from_pretrained(tmp_path / "final" / "D3-w6"), AcceptanceHead)


def test_a_folder_without_heads_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no acceptance head in"):
        load_heads(tmp_path)
    tiny_model("marian").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'marian' model, not an acceptance head"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"depth": -1}, "depth = -1"), ({"state": "slot"}, "state = 'slot'"), ({"depth": 4}, r"s\.3")],
)
def test_wrong_shapes_and_states_are_refused(changes, says, tmp_path):
    make_head().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=says):
        load_heads(tmp_path)
