"""Whisper by CTranslate2: its outputs are those of `generate`, and what it cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafttrain.decoding.ctranslate2.settings import placement, transcription
from drafttrain.decoding.ctranslate2.transcribe import load_transcriber, transcribe
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.models.ctranslate2 import check_convertible, convert
from tests.decoding.decoded import generate
from tests.tiny_models import tiny_model, tiny_source

pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed (it is in the dev extra)")


@pytest.mark.parametrize("changed", [{}, {"suppress_tokens": None}, {"begin_suppress_tokens": []}])
@pytest.mark.parametrize("longest", [3, 20])
def test_outputs_of_a_batch_are_those_of_generate(tmp_path: Path, changed, longest):
    model = tiny_model("whisper")
    model.generation_config.update(**changed)
    model = model.float()
    sources = [tiny_source([number, 3 * number], model) for number in range(8)]
    inputs = [source.inputs["input_features"].float() for source in sources]
    sources = [
        replace(source, inputs={"input_features": own})
        for source, own in zip(sources, inputs, strict=True)
    ]
    prefixes = [state.source.prefix.tolist() for state in CachedModel(model).encode_all(sources)]
    convert(model, tmp_path)
    whisper = load_transcriber(tmp_path, placement(model))
    how = transcription(model, longest)
    found = transcribe(whisper, torch.stack(inputs).numpy(), prefixes, how)
    assert found == generate(model, sources, longest)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"no_repeat_ngram_size": 2}, "asks for a NoRepeatNGramLogitsProcessor"),
        ({"no_timestamps_token_id": None}, "names no token for no timestamps"),
        ({"eos_token_id": [1, 2]}, "where one token is needed"),
    ],
    ids=str,
)
def test_what_it_would_do_otherwise_is_refused(changed, message):
    model = tiny_model("whisper")
    model.generation_config.update(**changed)
    with pytest.raises(ValueError, match=message):
        transcription(model, 9)


def test_another_activation_is_refused():
    config = tiny_model("whisper", activation_function="relu").config
    with pytest.raises(ValueError, match="no activation 'relu', .* \\(gelu are there\\)"):
        check_convertible(config, "baselines has 'ctranslate2'")
