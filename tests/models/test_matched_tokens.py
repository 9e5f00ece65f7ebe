"""A donor's rows for another vocabulary, by hand, where tokenizers spell texts otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.language_recipes import CausalDrafterRecipe
from drafttrain.models.causal_drafter import match_donor, start_drafter
from drafttrain.models.causal_recipe import check_causal_recipe
from drafttrain.models.loading import load_target
from drafttrain.models.matched_tokens import (
    adopt_tokens,
    match_tokens,
    matched_rows,
    pieces_of,
    texts_of,
)
from tests.comparing import close
from tests.tiny_models import tiny_model

G, S = "\u0120", "\u2581"


def byte_level() -> PreTrainedTokenizerFast:
    """A target's: <|end|>, a, b, " a", " ab", "é" of two bytes, its first byte, a special name, an
    added text; ids 9 and 10 are padding."""
    tokens = ["<|end|>", "a", "b", f"{G}a", f"{G}ab", "Ã©", "Ã", "<|im|>", "  "]
    return spelled(tokens, decoders.ByteLevel(), "<|end|>", ["<|im|>"], ["  "])


def sentencepiece() -> PreTrainedTokenizerFast:
    """A donor's: <unk>, </s>, bytes 0xC3 and 0xA9, a, " ", " a", b, "x"."""
    decoder = decoders.Sequence([decoders.Replace(S, " "), decoders.ByteFallback()])
    tokens = ["<unk>", "</s>", "<0xC3>", "<0xA9>", "a", S, f"{S}a", "b", "x"]
    return spelled(tokens, decoder, "</s>", ["<unk>"])


def spelled(tokens, decoder, eos, special=(), added=()) -> PreTrainedTokenizerFast:
    vocabulary: Mapping[str, int] = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.decoder, tokenizer.pre_tokenizer = decoder, pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([eos, *special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos)


MATCHED = ((1,), (4,), (7,), (6,), (6, 7), (2, 3), (2,), (), (5, 5), (), ())


def test_tokens_are_compared_as_the_bytes_that_they_stand_for() -> None:
    first = byte_level()
    assert texts_of(first) == {
        1: b"a", 2: b"b", 3: b" a", 4: b" ab", 5: b"\xc3\xa9", 6: b"\xc3", 8: b"  "
    }  # fmt: skip
    assert texts_of(sentencepiece()) == {
        2: b"\xc3", 3: b"\xa9", 4: b"a", 5: b" ", 6: b" a", 7: b"b", 8: b"x"
    }  # fmt: skip


def test_each_token_has_its_own_row_or_its_pieces_or_none() -> None:
    """</s> by its role, <|im|> is no text, and the last two are padding."""
    found = match_tokens(byte_level(), sentencepiece(), 11, 9)
    assert found.rows == MATCHED and found.known == tuple(range(9)) and found.exact == 5
    assert found.summary == (
        "11 tokens: 5 have the donor's own rows, 3 the mean of their pieces', 3 the mean of all"
    )


def test_the_other_way_round_and_rows_that_the_donor_lacks() -> None:
    back = match_tokens(sentencepiece(), byte_level(), 9, 9)
    assert back.rows == ((), (0,), (6,), (), (1,), (), (3,), (2,), ())  # 0xA9, " ", x: no pieces
    few = match_tokens(byte_level(), sentencepiece(), 9, 6)
    assert few.rows == ((1,), (4,), (), (5, 4), (), (2, 3), (2,), (), (5, 5))
    assert few.known == tuple(range(6))


def test_the_same_tokenizer_gives_every_token_its_own_row() -> None:
    same = match_tokens(byte_level(), byte_level(), 9, 9)
    assert same.rows == tuple((token,) for token in range(9)) and same.exact == 9


def test_pieces_are_the_longest_that_fit() -> None:
    tokens = {b"a": 0, b"ab": 1, b"c": 2}
    assert pieces_of(b"abca", tokens) == (1, 2, 0)
    assert pieces_of(b"abd", tokens) == pieces_of(b"", tokens) == ()


def test_rows_are_means_by_hand() -> None:
    weight = torch.arange(18.0).view(9, 2)
    rows = matched_rows(weight, match_tokens(byte_level(), sentencepiece(), 11, 9))
    assert rows[:7].tolist() == [[2, 3], [8, 9], [14, 15], [12, 13], [13, 14], [5, 6], [4, 5]]
    assert rows[7].tolist() == rows[9].tolist() == rows[10].tolist() == [8, 9]  # all of 0 ... 16
    assert rows[8].tolist() == [10, 11]
    bias = matched_rows(weight[:, 0], match_tokens(byte_level(), sentencepiece(), 3, 9))
    assert bias.tolist() == [2, 8, 14]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_adopts_them_as_embeddings_and_output(tied: bool) -> None:
    donor = tiny_model("llama", vocab_size=9)
    if tied:
        donor.config.tie_word_embeddings = True
        donor.tie_weights()
    before = [donor.model.embed_tokens.weight.clone(), donor.lm_head.weight.clone()]
    matches = match_tokens(byte_level(), sentencepiece(), 11, 9)
    adopt_tokens(donor, matches)
    assert donor.config.vocab_size == 11 == donor(torch.tensor([[10]])).logits.shape[-1]
    close(donor.model.embed_tokens.weight, matched_rows(before[0], matches))
    close(donor.lm_head.weight, matched_rows(before[1], matches))
    assert (donor.lm_head.weight is donor.model.embed_tokens.weight) == tied


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_drafter_starts_from_a_donor_of_another_vocabulary(tmp_path: Path) -> None:
    ids = {"bos_token_id": None, "pad_token_id": None}
    large = save(
        tiny_model("llama", vocab_size=11, eos_token_id=0, **ids), byte_level(), tmp_path / "t"
    )
    model = tiny_model("mistral", vocab_size=9, eos_token_id=1, **ids)
    model.config.draftable_tokens = [1, 2]
    small = save(model, sentencepiece(), tmp_path / "d")
    places = {
        "run": str(tmp_path / "run"),
        "target": {"path": large},
        "data": {"path": "rows.jsonl"},
    }

    def recipe(**start: object) -> CausalDrafterRecipe:
        return CausalDrafterRecipe.model_validate(places | {"initialise": start})

    with pytest.raises(ConfigError, match="different tokenizers.*initialise.vocabulary=matched"):
        check_causal_recipe(recipe(path=small))
    with pytest.raises(ConfigError, match="initialise.vocabulary = 'matched' is of .*not given"):
        check_causal_recipe(recipe(vocabulary="matched"))
    settings = recipe(path=small, vocabulary="matched")
    check_causal_recipe(settings)
    target = load_target(TargetConfig(path=large, device="cpu"))
    assert match_donor(recipe(path=small), target) is None
    matches = match_donor(settings, target)
    assert matches.rows == MATCHED
    drafter = start_drafter(settings, target.model, matches)
    assert drafter.config.model_type == "mistral" and drafter.config.vocab_size == 11
    assert drafter.config.eos_token_id == drafter.generation_config.eos_token_id == 0
    assert "draftable_tokens" not in vars(drafter.config)
    (tmp_path / "d" / "tokenizer.json").unlink()
    (tmp_path / "d" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="d': there is no tokenizer in it"):
        check_causal_recipe(settings)
