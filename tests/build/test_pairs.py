"""Targets and drafters load together, or are refused with one line that says why."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drafttrain.build.method import build_method
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import drafter_for, load_pair, make_drafter, open_kind
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, SamplingConfig, TreeConfig
from drafttrain.config.kinds import KINDS
from drafttrain.models.block_heads import BlockHeads, BlockHeadsConfig
from drafttrain.models.identity import hash_target
from tests.tiny_drafters import drafter_of
from tests.tiny_models import VOCAB, tiny_model
from tests.tiny_speech import save_whisper
from tests.tiny_targets import save_target, target_at


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """One folder per family, and one with another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen2", "t5", "marian"):
        save_target(tiny_model(family), root / family)
    save_target(tiny_model("gpt2", vocab_size=48), root / "wide")
    save_target(tiny_model("llama", num_hidden_layers=1), root / "shallow")
    return root


@pytest.mark.parametrize(("large", "small"), [("llama", "qwen2"), ("marian", "t5")])
def test_any_language_model_with_the_targets_vocabulary_drafts(folders, large, small):
    pair = load_pair(target_at(folders / large, dtype="bfloat16"), [str(folders / small)])
    assert pair.drafter.name == "causal"
    assert pair.drafter_model.config.model_type == small
    assert pair.drafter_model.dtype == pair.target.model.dtype == torch.bfloat16
    assert not pair.drafter_model.training
    sizes = [model.num_parameters() for model in (pair.drafter_model, pair.target.model)]
    ratios = build_method(DecodeConfig(drafter=str(folders / small)), pair).parameter_ratios
    assert ratios == {"causal": sizes[0] / sizes[1]}


def test_plain_decoding_and_max_gram_need_no_model(folders, tmp_path):
    pair = load_pair(target_at(folders / "llama"), ["none"])
    assert (pair.drafter.name, pair.drafter_model) == ("none", None)
    method = build_method(DecodeConfig(drafter="none"), pair)
    assert (method.parameters, method.parameter_ratios) == (None, {})
    pair = load_pair(target_at(folders / "llama"), ["max-gram"])
    assert (pair.drafter.name, pair.drafter_model, pair.drafter.bigrams) == ("max-gram", None, None)
    save_file({"next": torch.tensor([3, -1, 0])}, tmp_path / "b.safetensors")
    table = str(tmp_path / "b.safetensors")
    pair = load_pair(target_at(folders / "llama"), ["max-gram"], bigrams=table)
    assert pair.drafter.bigrams == [3, -1, 0] + [-1] * (VOCAB - 3)
    save_file({"next": torch.tensor([VOCAB])}, tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=f"token {VOCAB}, but the target has {VOCAB} tokens"):
        load_pair(target_at(folders / "llama"), ["max-gram"], bigrams=table)


def test_a_call_of_several_drafters_costs_their_mean_size(folders):
    tree = TreeConfig(kind="paths", drafters=(str(folders / "shallow"),))
    sampled = SamplingConfig(temperature=1.0)
    decode = DecodeConfig(drafter=str(folders / "qwen2"), tree=tree, sampling=sampled)
    pair = load_pair(target_at(folders / "llama"), *check_methods(decode))
    sizes = [sum(p.numel() for p in model.parameters()) for model in pair.models.values()]
    assert len(set(sizes)) == 2
    method, size = build_method(decode, pair), pair.target.model.num_parameters()
    assert method.parameters == sum(sizes)
    assert list(method.parameter_ratios.values()) == [pytest.approx(sum(sizes) / 2 / size)]


@pytest.mark.parametrize(("large", "small"), [("llama", "wide"), ("wide", "llama")])
def test_a_padded_vocabulary_is_taken_where_the_tokenizer_is_the_same(folders, large, small):
    pair = load_pair(target_at(folders / large), [str(folders / small)])
    size = pair.target.model.config.vocab_size
    assert (pair.drafter.model.row_size, pair.drafter.vocabulary) == (size, VOCAB)
    assert pair.drafter_model.config.vocab_size == 88 - size  # unchanged
    method = build_method(DecodeConfig(drafter=str(folders / small)), pair)
    assert method.assistant is None  # other programs could not draft with it


def test_another_vocabulary_is_refused_with_both_sizes(folders, tmp_path):
    """For a drafter folder without a tokenizer or with another one."""
    fits, wide = tmp_path / "fits", tmp_path / "wide"
    tiny_model("qwen2").save_pretrained(fits)  # taken at its size
    assert load_pair(target_at(folders / "llama"), [str(fits)]).drafter.name == "causal"
    tiny_model("llama", vocab_size=48).save_pretrained(wide)
    with pytest.raises(ConfigError, match="of 48 .*has 40, and the drafter's folder has no token"):
        load_pair(target_at(folders / "llama"), [str(wide)])
    save_target(tiny_model("llama", vocab_size=48), wide)
    (wide / "model.safetensors").unlink()  # refused before weights are read
    state = (wide / "tokenizer.json").read_text().replace('"w7"', '"v7"')
    (wide / "tokenizer.json").write_text(state)
    with pytest.raises(ConfigError, match="different tokenizers: token 7 is 'v7'"):
        load_pair(target_at(folders / "llama"), [str(wide)])


def test_a_decoder_of_speech_without_its_encoder_is_no_language_model(folders, tmp_path):
    save_whisper(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"is_encoder_decoder": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="'whisper' model, not a language model"):
        load_pair(target_at(tmp_path), ["none"])
    with pytest.raises(ConfigError, match="'whisper' model, which cannot draft"):
        load_pair(target_at(folders / "t5"), [str(tmp_path)])


def test_a_model_becomes_the_drafter_of_its_kind():
    target = tiny_model("marian", tie_word_embeddings=True)
    spec = drafter_of(target)
    shape = {"hidden_size": 16, "vocab_size": VOCAB, "is_encoder_decoder": True}
    heads = BlockHeads(BlockHeadsConfig(**shape))
    for model, kind in ((spec, "spec-drafter"), (heads, "block-heads"), (target, "causal")):
        assert make_drafter(model, target).name == kind
    assert open_kind(KINDS["max-gram"], [1, 2], None).bigrams == [1, 2]
    assert open_kind(KINDS["none"], None, None).name == "none"


def test_heads_go_with_the_very_target_that_they_were_trained_on():
    target, other = tiny_model("llama"), tiny_model("llama", seed=9)
    trained_on = {"path": "llama", "weights_sha256": hash_target(target)}
    shape = {"hidden_size": 16, "vocab_size": VOCAB}
    heads = BlockHeads(BlockHeadsConfig(**shape, target=trained_on))
    assert drafter_for(target, heads, "heads").name == "block-heads"
    with pytest.raises(ConfigError, match="with other weights"):
        drafter_for(other, heads, "heads")
