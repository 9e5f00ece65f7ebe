"""Drafters of every kind from loaded models."""

from __future__ import annotations

import pytest

from drafttrain.build.drafters import drafter_for, make_drafter, open_kind
from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import KINDS
from drafttrain.config.recipes import DrafterConfig
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.identity import hash_target
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import make_config
from tests.tiny_models import VOCAB, tiny_model


def test_a_model_becomes_the_drafter_of_its_kind():
    target = tiny_model("marian", tie_word_embeddings=True)
    spec = SpecDrafter(make_config(target.config, DrafterConfig(k=4), None, untied_output=True))
    shape = {"hidden_size": 16, "vocab_size": VOCAB, "is_encoder_decoder": True}
    heads = BlockHeads(BlockHeadsConfig(**shape))
    for model, kind in ((spec, "spec-drafter"), (heads, "block-heads"), (target, "causal")):
        assert make_drafter(model, target).name == kind
    assert open_kind(KINDS["max-gram"], [1, 2], None).bigrams == [1, 2]
    assert open_kind(KINDS["none"], None, None).name == "none"


def test_loaded_models_that_do_not_go_together_are_refused():
    target = tiny_model("llama")
    for model, message in (
        (tiny_model("t5"), "the drafter .* is an encoder-decoder model \\('t5'\\), but target"),
        (tiny_model("llama", vocab_size=48), "vocabulary of 48 tokens but target .* has 40"),
    ):
        with pytest.raises(ConfigError, match=message):
            drafter_for(target, model, "the drafter")


def test_heads_go_with_the_very_target_that_they_were_trained_on():
    target, other = tiny_model("llama"), tiny_model("llama", seed=9)
    trained_on = {"path": "llama", "weights_sha256": hash_target(target)}
    shape = {"hidden_size": 16, "vocab_size": VOCAB}
    heads = BlockHeads(BlockHeadsConfig(**shape, target=trained_on))
    assert drafter_for(target, heads, "heads").name == "block-heads"
    with pytest.raises(ConfigError, match="with other weights"):
        drafter_for(other, heads, "heads")
