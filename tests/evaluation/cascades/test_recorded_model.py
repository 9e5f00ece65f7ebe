"""Decoding on looked-up rows is real decoding, and calls models for new sequences only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.decoding.drafters.cascade import cascade
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Proposal, Sampling
from drafttrain.evaluation.cascades.candidates import Candidate
from drafttrain.evaluation.cascades.recorded_model import RecordedModel
from drafttrain.evaluation.cascades.search import CascadeReplay
from drafttrain.evaluation.prompts import Prompt
from tests.evaluation.cascades.replays import (
    NEW_TOKENS,
    facts,
    levels_of,
    prompts_of,
    replay_of,
    target_of,
)

FAMILIES = ["llama", "marian"]
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(1.0, top_k=20)}
CANDIDATES = [
    Candidate(((5, 5, 0), (5, 10), (10,))),
    Candidate(((4, 0, 0), (0, 0), (0,))),
    Candidate(((3, 2, 1), (2, 4), (3,)), 3.0),
    Candidate(((6, 0, 2), (3, 2), (0,)), 1.5),
    Candidate(((0, 4, 3), (0, 6), (0,))),
]


def decode(family: str, sampling: Sampling, prompt: Prompt, candidate: Candidate) -> Output:
    """Real decoding with the models themselves."""
    target = target_of(family)
    return Decoder(
        target,
        cascade(levels_of(family), candidate.increments, candidate.leniency, target.eos_ids),
        FixedLength(candidate.longest),
        build_verifier(AUTO, sampling),
        sampling,
        lambda _: sequence_randomness(3, prompt.row, target.device),
    ).decode_all([prompt.source], NEW_TOKENS)[0]


def made(replay: CascadeReplay) -> dict[str, int]:
    return {name: record.made for name, record in replay.records.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_replayed_rounds_and_calls_are_those_of_real_decoding(family, sampling):
    replay = replay_of(family, sampling)
    for prompt in prompts_of(family)[:2]:
        replayed = replay.replay(prompt, CANDIDATES)
        for candidate, output in zip(CANDIDATES, replayed, strict=True):
            real = decode(family, sampling, prompt, candidate)
            assert output.tokens == real.tokens
            assert facts(output) == facts(real)


def test_drafts_are_accepted_and_rejected_here():
    """Otherwise equal rounds would prove little."""
    prompts = prompts_of("llama")
    outputs = [decode("llama", Sampling(), prompt, CANDIDATES[0]) for prompt in prompts]
    rounds = [played for output in outputs for played in output.rounds]
    accepted, drafted = (sum(len(p) for p in of) for of in zip(*_paths(rounds), strict=True))
    assert 0.1 < accepted / drafted < 0.9


def _paths(rounds: Sequence) -> list[tuple]:
    return [(played.path, played.drafted) for played in rounds]


def test_the_target_is_not_called_again_for_greedy_output_that_it_has_said():
    replay, prompt = replay_of("llama", Sampling()), prompts_of("llama")[0]
    first, second = Candidate(((2, 0, 0), (0, 0), (0,))), Candidate(((5, 2, 3), (4, 2), (6,)))
    replay._decode(prompt, first)
    after_one = made(replay)
    replay._decode(prompt, second)
    assert after_one["target"] > 0
    assert made(replay)["target"] == after_one["target"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_candidate_makes_fewer_calls_than_it_asks_for(family):
    replay, prompt = replay_of(family, Sampling()), prompts_of(family)[0]
    first, second = Candidate(((5, 5, 0), (5, 10), (10,))), Candidate(((5, 4, 0), (4, 10), (8,)))
    replay._decode(prompt, first)
    before, asked = made(replay), {n: r.asked for n, r in replay.records.items()}
    replay._decode(prompt, second)
    new = sum(made(replay).values()) - sum(before.values())
    wanted = sum(r.asked for r in replay.records.values()) - sum(asked.values())
    assert new < wanted / 2


def test_a_candidate_that_comes_again_makes_no_call():
    replay, prompt = replay_of("llama", Sampling(1.0)), prompts_of("llama")[1]
    replay._decode(prompt, CANDIDATES[2])
    before = made(replay)
    replay._decode(prompt, CANDIDATES[2])
    assert made(replay) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_looked_up_rows_are_the_models_own(family):
    model, [prompt, *_] = target_of(family), prompts_of(family)
    recorded = RecordedModel(model)
    states = [model.encode(prompt.source), recorded.encode(prompt.source)]
    draft = Proposal.chain(torch.tensor([8, 30, 7]))
    longer = torch.cat((prompt.source.prefix, torch.tensor([8, 11])))
    for _ in range(2):  # computed, then looked up
        for own, state in ((model, states[0]), (recorded, states[1])):
            own.score([state], [prompt.source.prefix], [draft])
            own.keep(state, torch.tensor([0]))
        caught = [
            own.catch_up(state, longer)
            for own, state in zip((model, recorded), states, strict=True)
        ]
        fed = [
            own.feed(state, torch.tensor([9, 9]))
            for own, state in zip((model, recorded), states, strict=True)
        ]
        for ours, theirs in (caught, fed):
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-12)
            torch.testing.assert_close(ours.hidden[-1], theirs.hidden[-1], rtol=0, atol=1e-12)
    assert recorded.record.asked == 6 and recorded.record.made == 3


def test_rows_behind_a_rejected_token_are_not_computed():
    model, [prompt, *_] = target_of("llama"), prompts_of("llama")
    recorded = RecordedModel(model).skipping_rejected()
    state = recorded.encode(prompt.source)
    best = int(recorded.catch_up(state, prompt.source.prefix).logits[0].argmax())
    wrong = Proposal.chain(torch.tensor([(best + 1) % 40, 5, 6]))
    [score] = recorded.score([state], [prompt.source.prefix], [wrong])
    assert recorded.record.made == 1
    assert int(score.logits[0].argmax()) == best
    assert score.logits.shape[0] == 4 and not score.logits[1:].any()


def test_rows_are_forgotten_behind_each_prompt():
    replay = replay_of("llama", Sampling())
    replay.replay(prompts_of("llama")[0], CANDIDATES[:1])
    assert all(not record.sources for record in replay.records.values())


def test_trees_are_refused():
    recorded, [prompt, *_] = RecordedModel(target_of("llama")), prompts_of("llama")
    tree = Proposal(torch.tensor([5, 6, 7]), torch.tensor([-1, -1, 0]))
    with pytest.raises(ValueError, match="draft chains"):
        recorded.score([recorded.encode(prompt.source)], [prompt.source.prefix], [tree])
