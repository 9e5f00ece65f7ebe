"""The decoding loop: the tokens of plain decoding and `generate`, and correct ends."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import RunningSequence, play_round
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.types import Proposal
from tests.decoding.decoded import GREEDY, decoder_of, generate, run, sources_for, tokens_of
from tests.decoding.drafts import ScriptedDrafter, half_right
from tests.decoding.engine.fresh import close_caches, fresh
from tests.decoding.toys import ScriptedRows, ToyModel, toy_source
from tests.tiny_models import CAUSAL_FAMILIES, EOS, near_copy, tiny_model


def test_rounds_account_for_every_token():
    model = tiny_model("mbart")
    sources = sources_for(model)
    expected = generate(model, sources, 24)
    for output in run(model, sources, half_right(sources, expected)):
        assert [token for played in output.rounds for token in played.emitted] == output.tokens
        *others, last = (played.finished for played in output.rounds)
        assert last and not any(others)
        for played in output.rounds[:-1]:
            accepted = [played.drafted[node] for node in played.path]
            assert list(played.emitted[:-1]) == accepted
            assert played.target_seconds > 0


@pytest.mark.parametrize("family", ["bart", "qwen2"])
def test_max_length_is_reached_exactly_also_inside_a_block(family):
    model = tiny_model(family)
    sources, target = sources_for(model), CachedModel(model)
    answers = generate(model, sources, 24)
    drafter = half_right(sources, answers, wrong=0.0)
    for longest in (1, 2, 5, 7):
        outputs = decoder_of(target, drafter, 4).decode_all(sources, longest)
        assert tokens_of(outputs) == [answer[:longest] for answer in answers]
        for output in outputs:
            left = longest
            for played in output.rounds:
                assert len(played.drafted) <= min(4, left - 1)
                left -= len(played.emitted)


def test_decoding_ends_where_the_decoders_positions_do():
    model = tiny_model("marian", seed=1, max_position_embeddings=16)
    model.generation_config.eos_token_id = None
    sources = [make_source([5, 6, 7], model)]
    expected = generate(model, sources, 16)
    outputs = run(model, sources, half_right(sources, expected, wrong=0.1), max_new_tokens=1000)
    assert tokens_of(outputs) == expected
    assert len(outputs[0].tokens) == 16


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_prompt_and_its_continuation_share_the_positions(family):
    model = tiny_model(family, seed=1, max_position_embeddings=16)
    model.generation_config.eos_token_id = None
    sources = [make_source(range(4, 4 + length), model) for length in (3, 15, 16)]
    expected = [generate(model, [source], 17 - len(source.prefix))[0] for source in sources]
    outputs = run(model, sources, half_right(sources, expected, wrong=0.1), max_new_tokens=1000)
    assert tokens_of(outputs) == expected
    assert [len(output.tokens) for output in outputs] == [14, 2, 1]


@pytest.mark.parametrize(("target", "drafter"), [("llama", "qwen3"), ("gpt2", "opt"), ("t5", "t5")])
def test_caches_have_only_committed_tokens(target, drafter):
    """After every round both equal a fresh prefill, also if all draft tokens were accepted."""
    model = tiny_model(target)
    draft_model = tiny_model(drafter, seed=8)
    for name, weight in draft_model.state_dict().items():  # near the target: drafts are accepted
        if target == drafter:
            weight += 0.9 * (model.state_dict()[name] - weight)
    cached = CachedModel(model)
    decoder = decoder_of(cached, CausalDrafter(CachedModel(draft_model)), 3)
    accepted = set()
    for source in sources_for(model, 2):
        sequence = RunningSequence(decoder, 0, cached.encode(source), 16)
        while sequence.remaining > 0:
            before = sequence.tokens.tolist()
            [played] = play_round(decoder, [sequence])
            accepted.add(len(played.path))
            held = sequence.state
            # the last token has no row yet
            assert played.finished or held.cached == len(before) + len(played.emitted) - 1
            close_caches(held, fresh(model, source, held.tokens).past_key_values)
            state = run_single(sequence.session.sequence.begin())
            assert state.tokens == (before + played.drafted)[: state.cached]
            close_caches(state, fresh(draft_model, source, state.tokens).past_key_values)
    assert 0 in accepted and (target != drafter or 3 in accepted)


def scripted_target(path: list[int]) -> ToyModel:
    """Returns a toy target with a given greedy path, which EOS and 5 end."""
    target = ToyModel(0, vocabulary=6)
    target.eos_ids, target.table = frozenset((EOS, 5)), ScriptedRows(path, 6)
    return target


@pytest.mark.parametrize(
    ("path", "draft", "longest", "drafted", "accepted", "tokens"),
    [
        ([2, 3, EOS, 4, 2], [2, 3, EOS, 4], 20, [2, 3, EOS], 3, [2, 3, EOS]),  # 4 is not an input
        ([2, EOS, 4], [2, 3, 4], 20, [2, 3, 4], 1, [2, EOS]),  # a correction
        ([2, 3, EOS, 4], [2, 3], 20, [2, 3], 2, [2, 3, EOS]),  # the bonus token
        ([2, 5, EOS], [2, 5, EOS], 20, [2, 5], 2, [2, 5]),  # the other EOS
        ([2, 3, EOS, 4], [2, 3, EOS, 4], 3, [2, 3], 2, [2, 3, EOS]),  # the last possible token
    ],
)
def test_an_eos_ends_the_sequence(path, draft, longest, drafted, accepted, tokens):
    drafter = half_right([toy_source()], [draft], len(draft), wrong=0.0)
    decoder = decoder_of(scripted_target(path), drafter, len(draft))
    [output] = decoder.decode_all([toy_source()], longest)
    [played] = output.rounds
    assert (played.drafted, played.path) == (drafted, [*range(accepted)])
    assert output.tokens == played.emitted == tokens and played.finished


def test_rounds_stream_one_at_a_time():
    model = tiny_model("marian")
    rounds = decoder_of(model, NoDrafter(), 3).decode(sources_for(model), 5)
    assert [next(rounds).sequence for _ in range(5)] == [0] * 5
    assert next(rounds).sequence == 1
    assert torch.zeros(1).is_inference() is False  # the caller's mode is unchanged


def test_a_drafter_that_ignores_the_stop_policy_is_refused():
    class Ignores(ScriptedDrafter):
        def open(self, source, sampling, randomness):
            return self

        def propose(self, tokens, target_state, stop):
            return Proposal.chain(torch.tensor([2, 3, 4]))

    with pytest.raises(ValueError, match="proposed 3 tokens in a row, but the limit was 2"):
        decoder_of(scripted_target([2, 3, 4]), Ignores({}), 3).decode_all([toy_source()], 3)


def test_processors_are_made_once_for_all_that_is_decoded(monkeypatch):
    """Inputs decoded one by one share them."""
    model, made = tiny_model("bart"), []
    target = CachedModel(model)
    monkeypatch.setattr(target, "processors", lambda sampling: made.append(sampling) or real())
    real = partial(CachedModel.processors, target, GREEDY)
    decoder = decoder_of(target, NoDrafter(), 1)
    sources = sources_for(model)
    outputs = [output for source in sources for output in decoder.decode_all([source], 5)]
    assert tokens_of(outputs) == generate(model, sources, 5)
    assert made == [GREEDY]


def test_no_sources_give_no_outputs():
    assert run(tiny_model("marian"), [], NoDrafter()) == []


@pytest.mark.parametrize("family", ["bart", "t5", "marian"])
def test_a_prefix_of_several_tokens_is_decoded_from_as_generate_does(family):
    model = tiny_model(family)
    [plain] = sources_for(model)[:1]
    source = replace(plain, prefix=torch.cat([plain.prefix, torch.tensor([7, 20])]))
    expected = model.generate(
        source.input_ids[None],
        decoder_input_ids=source.prefix[None],
        do_sample=False,
        num_beams=1,
        max_new_tokens=20,
    )[0, len(source.prefix) :].tolist()
    small = CausalDrafter(CachedModel(near_copy(model, 0.05, seed=1)))
    for drafter in (NoDrafter(), small, TreeDrafter(small, Optimal(6)), MaxGramDrafter()):
        assert tokens_of(run(model, [source], drafter, 20)) == [expected]


def test_a_waiting_sequence_enters_in_the_round_after_one_has_ended():
    model = tiny_model("marian")
    sources = sources_for(model)
    played = list(decoder_of(model, NoDrafter(), 1).decode(sources, 24, batch_size=2))
    waiting, active = list(range(len(sources))), []
    while waiting or active:
        while waiting and len(active) < 2:
            active.append(waiting.pop(0))
        turn, played = played[: len(active)], played[len(active) :]
        assert [one.sequence for one in turn] == active
        active = [one.sequence for one in turn if not one.finished]
    assert not played


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "in a cascade"])
def test_a_source_longer_than_a_drafter_takes_is_decoded_plainly_and_marked(inner):
    model = tiny_model("llama")
    sources = sources_for(model)
    small = CachedModel(near_copy(model, 0.05, seed=1))
    small.source_limit = 6
    drafter = CausalDrafter(small)
    if inner:
        drafter = cascade(
            [Level("small", drafter), Level("copies", MaxGramDrafter())], [[1, 1], [1]]
        )
    outputs = run(model, sources, drafter, batch_size=2)
    assert tokens_of(outputs) == generate(model, sources, 24)
    long = [len(source.input_ids) > 6 for source in sources]
    assert 0 < sum(long) < len(long)
    for output, too_long in zip(outputs, long, strict=True):
        assert {played.too_long for played in output.rounds} == {too_long}
        assert any(played.drafted for played in output.rounds) is not too_long
