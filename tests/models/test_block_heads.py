"""Block heads: initial outputs equal the target's, save and load, and identity of the target."""

import copy

import pytest
import torch
from transformers import AutoModel

from drafttrain.config.base import ConfigError
from drafttrain.decoding.engine.teacher_forcing import project, teacher_force, teacher_forced_states
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.identity import check_same_target, hash_target
from tests.comparing import close, same_weights
from tests.tiny_drafters import block_heads
from tests.tiny_models import VOCAB, tiny_model

SOURCES = [[5, 9, 17, 30, 1], [7, 1]]
OUTPUTS = [[12, 6, 6, 1], [9, 33, 20, 10, 5, 8, 1]]


@pytest.mark.parametrize("family", ["marian", "t5", "bart", "llama", "gpt2", "opt"])
def test_untrained_block_heads_repeat_the_targets_next_token(family):
    target, heads = tiny_model(family), block_heads(std=None)
    found = teacher_forced_states(target, SOURCES, OUTPUTS)
    forced = teacher_force(target, SOURCES, OUTPUTS)
    for states, known in zip(found, forced, strict=True):
        close(states[:-1], known.before, 1e-12)
        logits = project(target, heads.each(states[:-1]))
        assert logits.shape == (3, len(known.before), VOCAB)
        assert (logits - known.logits).abs().max() < 1e-10


def test_each_head_equals_its_formula():
    heads, rows = block_heads(), torch.randn(5, 16, dtype=torch.float64)
    for j, found in enumerate(heads.each(rows)):
        inner = (rows @ heads.inner_weight[j] + heads.inner_bias[j]).clamp_min(0)
        expected = rows + inner @ heads.outer_weight[j] + heads.outer_bias[j]
        assert (found - expected).abs().max() < 1e-12
    close(heads.each(rows, 1, 3), heads.each(rows)[1:], 1e-12)
    assert heads.each(rows, 3).shape == (0, 5, 16)


def test_saved_heads_are_loaded_as_they_were(tmp_path):
    heads = block_heads(target={"path": "t"}, is_encoder_decoder=True)
    heads.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, BlockHeads) and again.config.k == 4
    assert again.config.target == {"path": "t"} and again.config.is_encoder_decoder
    assert same_weights(again, heads)


def test_heads_know_their_target_in_every_type():
    target, other = tiny_model("marian").float(), tiny_model("marian", seed=4).float()
    half = copy.deepcopy(target).bfloat16()
    config, of_half = (
        BlockHeadsConfig(target={"path": "t", "weights_sha256": hash_target(one)})
        for one in (target, half)
    )
    for heads, given in ((config, target), (config, half), (of_half, target)):
        check_same_target(heads, given, "heads")
    with pytest.raises(ConfigError, match="trained on target 't' with other weights"):
        check_same_target(config, other, "heads")
    with pytest.raises(ConfigError, match="does not say which target"):
        check_same_target(BlockHeadsConfig(), target, "heads")


def test_a_block_is_two_tokens_at_least():
    for k in (1, 0, "many"):
        with pytest.raises(ValueError, match="must be 2 or more"):
            BlockHeadsConfig(k=k)
