"""The target's logits processors: verified drafts give the outputs of `generate`."""

import pytest
import torch
from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.logits_processing import (
    RowProcessors,
    TargetProcessors,
    check_generation_config,
)
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Sampling
from tests.decoding.decoded import generate, run, sources_for, tokens_of
from tests.decoding.drafts import half_right
from tests.decoding.paths import nodes_to
from tests.tiny_models import EOS, VOCAB, tiny_model

GREEDY = Sampling()

SETTINGS = {
    "bad words": {"bad_words_ids": [[10], [12, 7], [30]]},
    "forced first": {"forced_bos_token_id": 11},
    "forced last": {"forced_eos_token_id": EOS},
    "minimal length": {"min_length": 14},
    "minimal new tokens": {"min_new_tokens": 14},
    "no repeat": {"no_repeat_ngram_size": 2},
    "no repeat of the source": {"encoder_no_repeat_ngram_size": 1},
    "repetition": {"repetition_penalty": 1.8},
    "repetition of the source": {"encoder_repetition_penalty": 1.8},
    "suppressed": {"suppress_tokens": [8, 9, 20], "begin_suppress_tokens": [14, 16, 25]},
    "bias": {"sequence_bias": [[[6], 2.0], [[7, 8], 5.0]]},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "several eos": {"eos_token_id": [EOS, 16, 21, 37]},
    "numbers": {"remove_invalid_values": True, "renormalize_logits": True},
    "bart-large-cnn": {
        "min_length": 14,
        "no_repeat_ngram_size": 3,
        "forced_bos_token_id": 3,
        "forced_eos_token_id": EOS,
        "length_penalty": 2.0,
        "early_stopping": True,
        "num_beams": 4,
    },
    "opus-mt": {"bad_words_ids": [[0]], "forced_eos_token_id": EOS, "num_beams": 6},
    "mbart": {"forced_bos_token_id": 33, "forced_eos_token_id": EOS, "num_beams": 5},
}


CASES = [("bart", name) for name in SETTINGS] + [
    ("marian", "opus-mt"),
    ("mbart", "mbart"),
    ("t5", "no repeat"),
    ("t5", "bad words"),
]
PROMPTED = ("repetition", "no repeat", "suppressed", "forced last", "decay", "several eos")
CASES += [("qwen2", name) for name in PROMPTED]
CASES += [("opt", "several eos"), ("gpt2", "minimal new tokens"), ("llama", "repetition")]


@pytest.mark.covered
@pytest.mark.parametrize(("family", "name"), CASES)
def test_decoding_equals_generate_under_the_targets_own_settings(family, name):
    model = tiny_model(family)
    model.generation_config.update(**SETTINGS[name])
    sources = sources_for(model, 3)
    expected = generate(model, sources, 15)
    assert tokens_of(run(model, sources, NoDrafter(), 15)) == expected
    drafter = half_right(sources, expected, wrong=0.3)
    assert tokens_of(run(model, sources, drafter, 15)) == expected


def test_every_setting_tried_changes_some_output():
    """A parity test would prove nothing for a setting without effect."""
    model = tiny_model("bart")
    sources = sources_for(model, 4)
    plain = generate(model, sources, 15)
    unchanged = set()
    for name, settings in SETTINGS.items():
        model = tiny_model("bart")
        model.generation_config.update(**settings)
        if generate(model, sources, 15) == plain:
            unchanged.add(name)
    assert unchanged == {"numbers"}  # it only guards against NaN and rescales


TREE_SETTINGS = {
    "no repeat": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[10], [7, 12], [8, 7, 9]]},
    "minimal length": {"min_length": 5},
    "last token": {"forced_eos_token_id": EOS},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"sequence_bias": [[[6], 2.0], [[8, 7, 9], 5.0]]},
    "several": {
        "no_repeat_ngram_size": 2,
        "suppress_tokens": [20],
        "forced_eos_token_id": EOS,
        "bad_words_ids": [[7, 12]],
    },
}


@pytest.mark.parametrize("name", TREE_SETTINGS)
def test_each_row_of_a_tree_is_processed_with_the_path_to_its_node(name):
    model = tiny_model("marian")
    model.generation_config.update(**TREE_SETTINGS[name])
    process = TargetProcessors(model, GREEDY).start(make_source([5, 6], model), 7)
    tokens, draft = torch.tensor([0, 6, 7]), torch.tensor([8, 7, 7, 12, 8, 30, 9])
    parents = torch.tensor([-1, -1, 0, 1, 1, 3, 2])
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))
    seen = process(tokens, draft, logits.clone(), parents)
    nothing = torch.empty(0, dtype=torch.long)
    for row, path in enumerate(paths_of_rows(tokens, draft, parents)):
        expected = process(path, nothing, logits[row : row + 1].clone())
        assert torch.equal(seen[row : row + 1], expected)
    as_chain = process(tokens, draft, logits.clone())
    assert not torch.equal(seen, as_chain)  # the settings depend on the path


@pytest.mark.parametrize("begins_at", [2, 3, 4, 5, 9])
def test_suppressed_tokens_are_those_of_transformers_on_the_path_of_each_row(begins_at):
    everywhere, at_first = [20, 9, VOCAB + 3], [8, EOS, VOCAB]
    theirs = [
        SuppressTokensLogitsProcessor(everywhere),
        SuppressTokensAtBeginLogitsProcessor(at_first, begins_at),
    ]
    tokens, draft = torch.tensor([0, 6, 7]), torch.tensor([8, 7, 7, 12, 8, 30, 9])
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(0))
    for parents in (None, torch.tensor([-1, -1, 0, 1, 1, 3, 2])):
        before = logits.clone()
        seen = RowProcessors(theirs)(tokens, draft, logits, parents)
        assert torch.equal(logits, before)
        for row, path in enumerate(paths_of_rows(tokens, draft, parents)):
            expected = logits[row : row + 1]
            for processor in theirs:
                expected = processor(path[None], expected)
            assert torch.equal(seen[row : row + 1], expected)


def paths_of_rows(tokens, draft, parents):
    """Returns the path that each row follows, from the root."""
    parents = torch.arange(-1, len(draft) - 1) if parents is None else parents
    for node in range(-1, len(draft)):
        yield torch.cat([tokens, draft[nodes_to(parents, node)]])


def test_a_chain_is_processed_alike_with_its_parents_and_without():
    model = tiny_model("marian")
    model.generation_config.no_repeat_ngram_size = 2
    process = TargetProcessors(model, GREEDY).start(make_source([5, 6], model), 10)
    tokens, draft = torch.tensor([0, 6, 7]), torch.tensor([6, 7, 6, 8])
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    with_parents = process(tokens, draft, logits.clone(), torch.arange(-1, 3))
    assert torch.equal(process(tokens, draft, logits.clone()), with_parents)
    nothing = torch.empty(0, dtype=torch.long)
    assert torch.equal(process(tokens, nothing, logits[:1], nothing), with_parents[:1])


def test_unsupported_settings_are_refused_by_name():
    settings = {"guidance_scale": 1.5, "prompt_lookup_num_tokens": 3, "stop_strings": ["x"]}
    for name, value in (settings | {"max_time": 1.0, "penalty_alpha": 0.6}).items():
        model = tiny_model("marian")
        model.generation_config.update(**{name: value})
        with pytest.raises(ValueError, match=f"{name}=.*generation_config.{name} = None"):
            TargetProcessors(model, GREEDY)


def test_other_warpers_are_refused_only_where_the_target_samples():
    model = tiny_model("marian")
    model.generation_config.typical_p = 0.5
    check_generation_config(model.generation_config, GREEDY)
    with pytest.raises(ValueError, match="typical_p"):
        check_generation_config(model.generation_config, Sampling(temperature=1.0))


def test_sampling_settings_of_the_target_are_left_to_the_user():
    """Without processors, logits are returned unchanged."""
    model = tiny_model("marian")
    source, logits = make_source([5, 6], model), torch.randn(3, VOCAB)
    for settings in ({}, {"do_sample": True, "temperature": 0.1, "top_k": 1}):
        model.generation_config.update(**settings)
        process = TargetProcessors(model, Sampling(temperature=1.0)).start(source, 10)
        assert process(torch.tensor([0]), torch.tensor([7, 8]), logits) is logits
