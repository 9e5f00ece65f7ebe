"""Decoders that count their cache are handed positions, for one call and no longer."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.engine.positions import biased_positions, embedded_positions, relative_bias
from tests.comparing import close
from tests.decoding.engine.fresh import any_model

FAMILIES = ("marian", "bart", "mbart", "pegasus", "t5", "flan-t5", "mt5")


def self_attention(family: str):
    return any_model(family).decoder.block[0].layer[0].SelfAttention


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_the_bias_of_a_chain_is_the_models_own(family):
    attention = self_attention(family)
    queries, keys = torch.arange(23, 30), torch.arange(30)
    own = attention.compute_bias(7, 30, past_seen_tokens=23)
    seen = relative_bias(attention, queries, keys)
    past = keys <= queries[:, None]
    assert seen.shape == own.shape
    assert torch.equal(seen[..., past], own[..., past])


def test_the_bias_depends_on_the_distance_of_positions_alone():
    attention = self_attention("t5")
    bias = relative_bias(attention, torch.tensor([5, 6, 6, 9]), torch.tensor([3, 4, 4, 7]))
    by_distance = attention.compute_bias(1, 10, past_seen_tokens=9)[0, :, 0].flip(-1)
    distances = [[2, 1, 1, 0], [3, 2, 2, 0], [3, 2, 2, 0], [6, 5, 5, 2]]  # 0 also for keys ahead
    assert torch.equal(bias[0], by_distance[:, torch.tensor(distances)])


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_handed_over_for_as_long_as_asked(family):
    model = any_model(family)
    decoder, positions = model.get_decoder(), torch.tensor([7, 2, 2])
    states = torch.randn(1, 4, 16, dtype=torch.float64)

    def run() -> torch.Tensor:
        with torch.inference_mode():
            ids = torch.tensor([[5, 6, 8]])
            return decoder(input_ids=ids, encoder_hidden_states=states, use_cache=False)[0]

    def handing_over():
        if family in ("t5", "flan-t5", "mt5"):
            return biased_positions(decoder, positions, positions)
        return embedded_positions(decoder, positions)

    before = run()
    with handing_over():
        assert (run() - before).abs().max() > 1e-3
    close(run(), before)
    with pytest.raises(RuntimeError, match="broken off"), handing_over():
        raise RuntimeError("broken off")
    close(run(), before)
