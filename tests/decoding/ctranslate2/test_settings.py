"""What a generation_config asks for is honoured as Transformers does it, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafttrain.data.distill.generation import trim
from drafttrain.decoding.ctranslate2.settings import placement, translation
from drafttrain.decoding.ctranslate2.translate import (
    Placement,
    check_placement,
    load_translator,
    translate,
    translate_checked,
)
from drafttrain.models.ctranslate2 import convert
from tests.tiny_models import EOS, PAD, tiny_model

pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed (it is in the dev extra)")

ENDS = [EOS, 15, 21, 25]
SOURCES = [[4 + (i * 13 + j * 7) % 36 for j in range(1 + i % 5)] + [EOS] for i in range(12)]
HONOURED = {
    "several ends": {},
    "minimal length": {"min_length": 6},
    "minimal new tokens": {"min_new_tokens": 6},
    "no repeated n-gram": {"no_repeat_ngram_size": 2, "bad_words_ids": [[PAD]]},
    "forced first token": {"forced_bos_token_id": 7},
    "forced last token": {"forced_eos_token_id": EOS},
    "bad words": {"bad_words_ids": [[37], [19], [5, 6], [EOS]]},
    "suppressed tokens": {"suppress_tokens": [37, 19]},
}


@pytest.fixture(scope="module")
def translators(tmp_path_factory) -> dict:
    """A translator for each family that starts its decoder in another way."""
    found = {}
    for family in ("marian", "bart", "t5"):
        model = tiny_model(family)
        folder: Path = tmp_path_factory.mktemp(family)
        convert(model, folder)
        found[family] = load_translator(folder, placement(model))
    return found


def asking(family: str, **asked):
    model = tiny_model(family)
    model.generation_config.update(**{"eos_token_id": ENDS} | asked)
    return model


def generated(model, **settings) -> list[list[int]]:
    greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": 12, "max_length": None}
    sources = [torch.tensor([source]) for source in SOURCES]
    return [trim(model.generate(source, **greedy | settings), model)[0] for source in sources]


@pytest.mark.parametrize("case", HONOURED)
@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_greedy_outputs_are_those_of_generate(translators, family, case):
    model = asking(family, **HONOURED[case])
    assert translate(translators[family], SOURCES, translation(model, 12)) == generated(model)


def test_a_batch_gives_what_its_rows_give_alone(translators):
    how = translation(asking("marian"), 12)
    together = translate_checked(translators["marian"], SOURCES, how)
    assert together == [translate(translators["marian"], [one], how)[0] for one in SOURCES]


def test_a_source_of_nothing_but_its_end_is_decoded_too(translators):
    model = asking("marian")
    [found] = translate(translators["marian"], [[EOS]], translation(model, 12))
    expected = model.generate(torch.tensor([[EOS]]), max_new_tokens=12, max_length=None)
    assert [found] == trim(expected, model) and len(found) > 1


def test_beams_agree_with_transformers_where_both_stop_at_the_same_place(translators):
    """early_stopping: a search ends when as many hypotheses are finished as there are beams."""
    model = asking("bart", early_stopping=True, length_penalty=0.7)
    how = translation(model, 12, num_beams=3)
    assert how.asked["patience"] == 1.0 and how.asked["length_penalty"] == 0.7
    found = translate(translators["bart"], SOURCES, how)
    expected = generated(model, num_beams=3)
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    assert same >= len(SOURCES) - 1
    assert found != translate(translators["bart"], SOURCES, translation(model, 12))


REFUSED = {
    "RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.5},
    "SequenceBiasLogitsProcessor": {"sequence_bias": [[[5], 1.0]]},
    "SuppressTokensAtBeginLogitsProcessor": {"begin_suppress_tokens": [5]},
    "no_repeat_ngram_size=2": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size=1": {"no_repeat_ngram_size": 1, "bad_words_ids": [[PAD]]},
    "guidance_scale": {"guidance_scale": 2.0},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_done_otherwise_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        translation(asking("marian", **REFUSED[name]), 12)


def test_beams_refuse_what_bars_tokens_unless_scores_are_normalised_again():
    barred = {"bad_words_ids": [[PAD]]}
    with pytest.raises(ValueError, match="NoBadWords.* set renormalize_logits to true"):
        translation(asking("marian", **barred), 12, num_beams=2)
    translation(asking("marian", renormalize_logits=True, **barred), 12, num_beams=2)
    with pytest.raises(ValueError, match="early_stopping='never'"):
        translation(asking("marian", early_stopping="never"), 12, num_beams=2)


def test_scores_that_are_not_finite_give_no_output(tmp_path):
    model = tiny_model("marian")
    model.get_decoder().layers[0].fc1.weight.data[3] = float("nan")
    convert(model, tmp_path)
    translator = load_translator(tmp_path, placement(model))
    assert translate_checked(translator, SOURCES[:2], translation(model, 4)) == [None, None]


def test_numbers_that_a_device_has_not_are_refused():
    with pytest.raises(ValueError, match="no float17 on this cpu, but .*float32.*; give another"):
        check_placement(replace(Placement(), compute_type="float17"))
