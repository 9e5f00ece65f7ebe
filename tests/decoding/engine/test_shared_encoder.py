"""Drafters that share the target's encoder: a shallow Whisper decoder, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel, WhisperForCausalLM

from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter, open_drafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.batched import Batched
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.shallow_decoder import PARTS, same_cross_layers
from tests.comparing import close
from tests.decoding.decoded import generate, run, tokens_of
from tests.tiny_models import near_copy, tiny_model, tiny_source
from tests.tiny_speech import shallow


@pytest.fixture
def target() -> PreTrainedModel:
    return tiny_model("whisper", decoder_layers=3)


@pytest.fixture
def drafter(target) -> WhisperForCausalLM:
    return near_copy(shallow(target, 2), 0.02, seed=1)


def clips(model: PreTrainedModel) -> list[Source]:
    return [tiny_source([number, 3 * number], model) for number in range(6)]


@torch.no_grad()
def test_rows_are_those_of_the_drafters_own_module(target, drafter):
    states = CachedModel(target).encode_all(clips(target))
    model, tokens = CachedModel(drafter), [4, 5, 8, 39, 20, 11, 30]
    begun = model.encode_all([replace(state.source, encoded=state.encoded) for state in states])
    outputs = model.feed_chains([(state, torch.tensor(tokens)) for state in begun])
    for state, output in zip(states, outputs, strict=True):
        features = state.source.inputs["input_features"][None]
        close(state.encoded, target.get_encoder()(features)[0][0])
        expected = drafter(torch.tensor([tokens]), encoder_outputs=(state.encoded[None],)).logits[0]
        given = torch.ones(len(expected[0]), dtype=torch.bool)
        given[drafter.generation_config.suppress_tokens] = False
        close(output.logits[:, given], expected[:, given], 1e-10)
        assert (output.logits[:, ~given] < -9e3).all()


def test_one_pass_along_outputs_gives_the_rows_of_decoding(target, drafter):
    """Of the drafter and of its target, from sources that hold what the encoder made of them."""
    reader, outputs = CachedModel(target), [[5, 8, 39], [20, 11, 30, 6, 17], [4, 4]]
    sources = [reader.read(source) for source in clips(target)[:3]]
    for model in (drafter, target):
        cached = CachedModel(model)
        for source, output, forced in zip(
            sources, outputs, teacher_force(model, sources, outputs), strict=True
        ):
            [state] = cached.encode_all([source])
            rows = cached.feed(state, torch.cat([source.prefix, torch.tensor(output)])).logits
            close(forced.logits, rows[len(source.prefix) - 1 : -1], 1e-10)


def test_outputs_are_those_of_generate_in_chains_trees_batches_and_cascades(target, drafter):
    sources = clips(target)
    expected = generate(target, sources, 20)
    causal = CausalDrafter(CachedModel(drafter))
    levels = cascade([Level("one", causal), Level("max-gram", MaxGramDrafter())], [[2, 3], [4]])
    plain = sum(len(output.rounds) for output in run(target, sources, NoDrafter(), 20))
    for method in (causal, TreeDrafter(causal, Optimal(12)), levels):
        for batch_size in (1, 4):
            outputs = run(target, sources, method, 20, batch_size=batch_size)
            assert tokens_of(outputs) == expected
            assert sum(len(output.rounds) for output in outputs) < 0.9 * plain


def test_a_copy_of_the_whole_decoder_is_always_right(target):
    target.generation_config.begin_suppress_tokens = None
    copied = CausalDrafter(CachedModel(shallow(target, 3)))
    outputs = run(target, clips(target), copied, 20, k=4, batch_size=3)
    for output in outputs:
        assert all(len(played.path) == len(played.drafted) for played in output.rounds[:-1])
        assert len(output.rounds[0].drafted) == 4  # from the first round on


def test_keys_and_values_that_are_the_targets_are_taken_from_it(target, monkeypatch):
    drafter = near_copy(shallow(target, 2), 0.02, seed=1)
    expected = tokens_of(run(target, clips(target), NoDrafter(), 20))
    for name, value in shallow(target, 2).state_dict().items():
        if PARTS["cross-keys-values"].match(name):
            drafter.state_dict()[name].copy_(value)
    assert same_cross_layers(drafter, target) == (0, 2)
    made = []
    remember = Batched._remember_sources

    def note(engine, lines, encoded) -> None:
        made.append(len(engine.stack.layers))
        remember(engine, lines, encoded)

    monkeypatch.setattr(Batched, "_remember_sources", note)
    drafts = []
    for taken in (open_drafter(drafter, target), CausalDrafter(CachedModel(drafter))):
        made.clear()
        levels = cascade([Level("one", taken), Level("max-gram", MaxGramDrafter())], [[2, 3], [4]])
        for method in (taken, TreeDrafter(taken, Optimal(12)), levels):
            outputs = run(target, clips(target), method, 20, batch_size=4)
            assert tokens_of(outputs) == expected
            drafts.append([played.drafted for output in outputs for played in output.rounds])
        assert (2 in made) == (taken.requires.cross_layers == ())  # the target has 3 layers
    assert drafts[:3] == drafts[3:]


def test_a_drafter_of_other_keys_and_values_makes_its_own(target, drafter):
    assert same_cross_layers(drafter, target) is None
    assert open_drafter(drafter, target).requires.cross_layers == ()


def test_a_clip_is_encoded_once(target, drafter):
    shapes = []
    hook = target.get_encoder().register_forward_hook(lambda *call: shapes.append(call[2][0].shape))
    run(target, clips(target), CausalDrafter(CachedModel(drafter)), 20, batch_size=4)
    hook.remove()
    assert sum(shape[0] for shape in shapes) == 6


def test_a_drafter_with_an_encoder_of_its_own_uses_that_beside_one_that_shares(target, drafter):
    encoders = near_copy(target, 0.05, seed=1), near_copy(target, 0.05, seed=2)
    shared, own = CausalDrafter(CachedModel(drafter)), CausalDrafter(CachedModel(encoders[0]))
    alone = run(target, clips(target), own, 20, k=3)
    levels = cascade([Level("own", own), Level("shared", shared)], [[2, 0], [1]])
    calls = []
    encoders[0].get_encoder().register_forward_hook(lambda *call: calls.append(call))
    beside = run(target, clips(target), levels, 20, k=3)
    assert calls and tokens_of(beside) == tokens_of(alone)
    drafted = [output.rounds[0].drafted[0] for output in beside]
    assert drafted == [output.rounds[0].drafted[0] for output in alone]


def test_a_source_that_the_target_has_not_encoded_is_refused(target, drafter):
    causal = CausalDrafter(CachedModel(drafter))
    session = causal.open(clips(target)[0], Sampling(), sequence_randomness(0, 0))
    with pytest.raises(ValueError, match="reads the target's encoder, but the source has not been"):
        alone(session.own.begin())
