"""Played rounds are those of real decoding, and call models for new sequences only."""

from __future__ import annotations

import pytest

from drafttrain.build.method import build_method, build_sampling
from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import Output
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.played.increments import Increments
from drafttrain.evaluation.played.player import Player
from drafttrain.evaluation.prompts import Prompt
from tests.evaluation.played.pairs import (
    GREEDY,
    NEW_TOKENS,
    SAMPLED,
    cascade,
    facts,
    pair_of,
    player_of,
    prompts_of,
    target_of,
    tree,
)

SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
CASCADES = [
    Increments(((5, 5, 0), (5, 10), (10,))),
    Increments(((4, 0, 0), (0, 0), (0,))),
    Increments(((3, 2, 1), (2, 4), (3,)), 3.0),
    Increments(((6, 0, 2), (3, 2), (0,)), 1.5),
    Increments(((0, 4, 3), (0, 6), (0,))),
]


def candidates_of(family: str, sampling: SamplingConfig) -> list[Played]:
    found = [
        tree(sampling, kind="opt-tree", nodes=3),
        tree(sampling, kind="opt-tree", nodes=9),
        tree(sampling, 3, kind="binary", nodes=6),
    ]
    if sampling.temperature > 0:
        found.append(tree(sampling, 2, kind="rsd-s", width=3))
    return found if family == "slots" else found + [cascade(one, sampling) for one in CASCADES]


def decode(family: str, sampling: SamplingConfig, prompt: Prompt, candidate: Played) -> Output:
    """Real decoding with the models themselves."""
    target, method = target_of(family), build_method(candidate.decode, pair_of(family))
    return Decoder(
        target,
        method.drafter,
        method.stop,
        method.verifier,
        build_sampling(sampling),
        lambda _: sequence_randomness(3, prompt.row, target.device),
    ).decode_all([prompt.source], NEW_TOKENS)[0]


def made(player: Player) -> list[int]:
    return [record.made for record in player.records]


@pytest.mark.parametrize("family", ["llama", "marian", "slots"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_played_rounds_and_calls_are_those_of_real_decoding(family, sampling):
    player, candidates = player_of(family, sampling), candidates_of(family, sampling)
    for prompt in prompts_of(family)[:2]:
        for candidate, output in zip(candidates, player.play(prompt, candidates), strict=True):
            real = decode(family, sampling, prompt, candidate)
            assert output.tokens == real.tokens, candidate.name
            assert facts(output) == facts(real), candidate.name


def test_drafts_are_accepted_and_rejected_here():
    """Otherwise equal rounds would prove little."""
    for candidate in (cascade(CASCADES[0]), tree(kind="opt-tree", nodes=9)):
        outputs = [decode("llama", GREEDY, prompt, candidate) for prompt in prompts_of("llama")]
        rounds = [played for output in outputs for played in output.rounds]
        accepted, drafted = (sum(len(getattr(p, of)) for p in rounds) for of in ("path", "drafted"))
        assert 0.05 < accepted / drafted < 0.9
    assert any(played.depth < len(played.drafted) for played in rounds), "no draft branches"


def test_the_target_is_not_called_again_for_greedy_output_that_it_has_said():
    player, prompt = player_of("llama"), prompts_of("llama")[0]
    player.decode(prompt, cascade(Increments(((2, 0, 0), (0, 0), (0,)))))
    [after_one, *_] = made(player)
    player.decode(prompt, cascade(Increments(((5, 2, 3), (4, 2), (6,)))))
    player.decode(prompt, tree(kind="opt-tree", nodes=9))
    assert after_one > 0 and made(player)[0] == after_one


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_a_second_cascade_makes_fewer_calls_than_it_asks_for(family):
    player, prompt = player_of(family), prompts_of(family)[0]
    player.decode(prompt, cascade(CASCADES[0]))
    before, asked = made(player), sum(record.asked for record in player.records)
    player.decode(prompt, cascade(Increments(((5, 4, 0), (4, 10), (8,)))))
    wanted = sum(record.asked for record in player.records) - asked
    assert sum(made(player)) - sum(before) < wanted / 2


def test_a_cascade_that_comes_again_makes_no_call():
    player, prompt = player_of("llama", SAMPLED), prompts_of("llama")[1]
    again = cascade(CASCADES[2], SAMPLED)
    player.decode(prompt, again)
    before = made(player)
    player.decode(prompt, again)
    assert made(player) == before


def test_rows_are_forgotten_behind_each_prompt():
    player = player_of("llama")
    player.play(prompts_of("llama")[0], [cascade(CASCADES[0])])
    assert all(not record.sources for record in player.records)
