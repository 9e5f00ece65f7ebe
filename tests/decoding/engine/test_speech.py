"""Whisper: its decoder prefix, and the outputs of `generate`, in float64."""

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.encoding import CLIPS_AT_ONCE
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.engine.speech import OPEN, read_start
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.decoding.trees.chosen import Optimal
from tests.comparing import close
from tests.decoding.decoded import generate, run, tokens_of
from tests.tiny_models import (
    EOS,
    LANGUAGES,
    NO_TIMESTAMPS,
    START,
    TASKS,
    near_copy,
    tiny_model,
    tiny_source,
)

OPTIMAL = Optimal(12)
TRANSCRIBE, TRANSLATE = TASKS
ENGLISH, GERMAN, FRENCH = LANGUAGES.values()


def whisper(**settings: object) -> PreTrainedModel:
    """Returns the tiny Whisper with these values in its generation_config; None removes one."""
    model = tiny_model("whisper")
    for name, value in settings.items():
        if value is None and hasattr(model.generation_config, name):
            delattr(model.generation_config, name)
        else:
            setattr(model.generation_config, name, value)
    return model


def clips(model: PreTrainedModel, count: int = 4) -> list:
    return [tiny_source([number, 3 * number], model) for number in range(count)]


STARTS = {
    "nothing set": ({}, [START, None, NO_TIMESTAMPS]),
    "task": ({"task": "translate"}, [START, None, TRANSLATE, NO_TIMESTAMPS]),
    "language": ({"language": "German"}, [START, GERMAN, TRANSCRIBE, NO_TIMESTAMPS]),
    "its code": ({"language": "fr"}, [START, FRENCH, TRANSCRIBE, NO_TIMESTAMPS]),
    "its token": ({"language": "<|en|>"}, [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS]),
    "both": ({"language": "de", "task": "translate"}, [START, GERMAN, TRANSLATE, NO_TIMESTAMPS]),
    "forced, language open": (
        {"forced_decoder_ids": [[1, None], [2, TRANSLATE]]},
        [START, None, TRANSLATE, NO_TIMESTAMPS],
    ),
    "forced": (
        {"forced_decoder_ids": [[1, FRENCH], [2, TRANSCRIBE], [3, NO_TIMESTAMPS]]},
        [START, FRENCH, TRANSCRIBE, NO_TIMESTAMPS],
    ),
    "forced, but set": (
        {"forced_decoder_ids": [[1, FRENCH]], "language": "en"},
        [START, ENGLISH, TRANSCRIBE, NO_TIMESTAMPS],
    ),
    "forced from elsewhere": (
        {"forced_decoder_ids": [[2, TRANSLATE]]},
        [START, None, NO_TIMESTAMPS],
    ),
    "English alone": (
        {"is_multilingual": False, "lang_to_id": None, "task_to_id": None},
        [START, NO_TIMESTAMPS],
    ),
    "English, forced": (
        {"lang_to_id": None, "task_to_id": None, "forced_decoder_ids": [[1, NO_TIMESTAMPS]]},
        [START, NO_TIMESTAMPS],
    ),
    "no word of timestamps": ({"no_timestamps_token_id": None}, [START, None]),
}


@pytest.mark.parametrize("name", STARTS)
def test_decoding_starts_and_goes_on_as_generate_does(name):
    settings, expected = STARTS[name]
    model = whisper(**settings)
    found = read_start(model.generation_config, model.config)
    assert found == [OPEN if token is None else token for token in expected]
    sources, chosen = clips(model), set()
    for state in CachedModel(model).encode_all(sources):
        prefix = state.source.prefix.tolist()
        assert [b if a is None else a for a, b in zip(expected, prefix, strict=True)] == prefix
        chosen.add(prefix[1])
    if None in expected:
        assert chosen <= set(LANGUAGES.values()) and len(chosen) > 1  # depends on clip
    found = generate(model, sources, 14)
    causal = CausalDrafter(CachedModel(near_copy(model, 0.05, seed=1)))
    levels = cascade([Level("one", causal), Level("max-gram", MaxGramDrafter())], [[2, 3], [4]])
    rounds = []
    for drafter in (NoDrafter(), levels, TreeDrafter(causal, OPTIMAL)):
        outputs = run(model, sources, drafter, 14, batch_size=3)
        assert tokens_of(outputs) == found
        rounds.append(sum(len(output.rounds) for output in outputs))
    plain, *_, tree = rounds
    assert tree < 0.7 * plain  # drafts were accepted


def test_the_encoder_runs_once_where_the_language_is_open():
    model, shapes = whisper(), []
    model.get_encoder().register_forward_hook(lambda *given: shapes.append(given[2][0].shape[0]))
    run(model, clips(model), NoDrafter(), 5, batch_size=3)
    assert sum(shapes) == 4 and max(shapes) == CLIPS_AT_ONCE


def test_outputs_end_where_generate_ends_them_for_want_of_positions():
    model = whisper()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.generation_config.suppress_tokens = [0, EOS]
    sources = clips(model, 3)
    target = CachedModel(model)
    assert [target.max_new_tokens(source, 1000) for source in sources] == [61] * 3
    features = [source.inputs["input_features"][None] for source in sources]
    theirs = [model.generate(own, max_length=1000)[0].tolist() for own in features]
    assert [len(tokens) for tokens in theirs] == [61] * 3
    assert tokens_of(run(model, sources, NoDrafter(), 1000)) == theirs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"language": "Klingon"}, "target.language = 'Klingon' .* one of: de, en, fr"),
        ({"task": "sing"}, "target.task = 'sing' .* transcribe or translate"),
        ({"language": "de", "is_multilingual": False}, "transcribes only English"),
        ({"task": "translate", "task_to_id": None}, "transcribes only English"),
        ({"forced_decoder_ids": [[1, 5], [3, 8]]}, "forced_decoder_ids"),
    ],
    ids=str,
)
def test_settings_that_a_speech_model_does_not_support_are_refused(settings, message):
    model = whisper(**settings)
    with pytest.raises(ValueError, match=message):
        read_start(model.generation_config, model.config)


@pytest.mark.parametrize("name", ["return_timestamps", "no_speech_threshold"])
def test_settings_that_add_to_the_rows_are_refused(name):
    model = whisper(**{name: True})
    with pytest.raises(ValueError, match=f"sets {name}"):
        run(model, clips(model, 1), NoDrafter(), 5)


def test_features_have_the_models_precision():
    model = whisper().to(torch.bfloat16)
    [state] = CachedModel(model).encode_all(clips(model, 1))
    assert state.encoded.dtype == torch.bfloat16


def test_one_pass_along_outputs_gives_the_rows_of_decoding():
    cached, outputs = CachedModel(whisper()), [[5, 8, 39], [20, 11, 30, 6, 17], [4, 4]]
    sources = [cached.read(source) for source in clips(cached.model)[:3]]
    found = teacher_force(cached.model, sources, outputs)
    for source, output, forced in zip(sources, outputs, found, strict=True):
        path = torch.cat([source.prefix, torch.tensor(output)])
        request = ForwardRequest(cached.encode(source), path.tolist(), len(path))
        [rows] = cached.forward_batch([request])
        close(forced.logits, rows.logits[len(source.prefix) - 1 : -1], 1e-10)
