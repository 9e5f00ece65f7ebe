"""Parallel drafters: what is refused before weights are read, and the choice of the mask token."""

import datasets
import pytest
from transformers import LlamaConfig, T5Config

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import CAUSAL, PARALLEL, kind_of
from drafttrain.data.distill.recipe_rows import choose_mask
from drafttrain.export.engines import check_engines, engines_for
from drafttrain.models.drafters import read_drafter_settings
from drafttrain.models.parallel_drafter import check_blocks
from tests.tiny_models import VOCAB, tiny_model
from tests.tiny_targets import tiny_tokenizer


def test_a_language_model_is_parallel_where_its_config_says_so(tmp_path):
    model = tiny_model("llama")
    assert kind_of(model.config) is CAUSAL
    model.config.pard_token, model.config.k = 3, 4
    assert kind_of(model.config) is PARALLEL
    model.save_pretrained(tmp_path)
    again = read_drafter_settings(str(tmp_path))
    assert kind_of(again) is PARALLEL and (again.pard_token, again.k) == (3, 4)


@pytest.mark.parametrize(
    ("kind", "entries", "words"),
    [
        (
            LlamaConfig,
            {"pard_token": VOCAB, "k": 4},
            "pard_token = 40.*one of its 40.*correct",
        ),
        (LlamaConfig, {"pard_token": "x", "k": 4}, "pard_token = 'x'.* delete"),
        (LlamaConfig, {"pard_token": 3}, 'k = None.* add "k": 8'),
        (LlamaConfig, {"pard_token": 3, "k": 0}, "k = 0"),
        (T5Config, {"pard_token": 3, "k": 4}, "encoder-decoder model; parallel drafters"),
    ],
)
def test_a_config_that_does_not_say_how_blocks_are_drafted_is_refused(kind, entries, words):
    with pytest.raises(ConfigError, match=f"drafter 'x' .*{words}"):
        check_blocks(kind(vocab_size=VOCAB, **entries), "drafter 'x'")


def rows(*tokens: int) -> datasets.Dataset:
    half = len(tokens) // 2
    columns = {"source_ids": [list(tokens[:half])], "target_ids": [list(tokens[half:])]}
    return datasets.Dataset.from_dict(columns)


def test_a_mask_is_a_token_that_no_row_holds():
    tokenizer = tiny_tokenizer()
    named = len(tokenizer)
    reserved = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    assert choose_mask(None, tokenizer, named + 2, rows(5, 6)) == named + 1  # no token has this id
    assert choose_mask(None, tokenizer, named, rows(5, 6)) == named - 1
    assert choose_mask(None, tokenizer, named, rows(named - 1, 6)) == named - 2
    every = [token for token in range(named) if token not in reserved]
    with pytest.raises(ConfigError, match="hold all .* tokens of the vocabulary.* add a special"):
        choose_mask(None, tokenizer, named, rows(*every))
    assert choose_mask(7, tokenizer, named, rows(5, 6)) == 7
    assert choose_mask(5, tokenizer, named, rows(5, 6)) == named - 1  # 5 is no mask any more
    tokenizer.add_special_tokens({"mask_token": "w8"})
    assert choose_mask(None, tokenizer, named + 2, rows(5, 6)) == 8


def test_the_engines_that_draft_blocks_take_it():
    config = LlamaConfig(vocab_size=VOCAB, pard_token=3, k=4)
    assert [engine.name for engine in engines_for([], config)] == ["vllm", "tensorrt-llm"]
    with pytest.raises(ConfigError, match="--for sglang: .* is a parallel drafter"):
        check_engines(["vllm", "sglang"], "DRAFTER", config, "TARGET")
