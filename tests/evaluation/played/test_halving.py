"""Successive halving: who goes on, who sees which prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafttrain.decoding.types import Output, Round
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.played.counts import count_output
from drafttrain.evaluation.played.halving import Halving, Rung, halve, play_also
from drafttrain.evaluation.stops.replay import PolicyCounts
from tests.evaluation.played.pairs import rate, tree


def toy(nodes: int) -> Played:
    return tree(kind="opt-tree", nodes=nodes)


class ToyPlay:
    """A tree of n nodes emits n tokens a round, whatever the prompt."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        """Prompt, and how many candidates saw it."""

    def __call__(self, prompt: int, candidates: Sequence[Played]) -> list[PolicyCounts]:
        self.seen.append((prompt, len(candidates)))
        outputs = [Output(rounds=[Round(0, [], [], [7] * one.nodes)]) for one in candidates]
        return [count_output(output, 0) for output in outputs]


def rank(counts: Mapping[Played, PolicyCounts]) -> list[list[Played]]:
    return [sorted(counts, key=lambda one: -rate(counts[one]))]


def rank_both_ways(counts: Mapping[Played, PolicyCounts]) -> list[list[Played]]:
    [best_first] = rank(counts)
    return [best_first, best_first[::-1]]


def test_the_better_half_goes_on_and_few_see_all_prompts():
    play, candidates = ToyPlay(), [toy(nodes) for nodes in range(1, 33)]
    found = halve(candidates, 60, play, rank, Halving(first=4, finalists=4))
    assert found.rungs == [Rung(4, 32), Rung(8, 16), Rung(16, 8), Rung(60, 4)]
    assert play.seen == [
        (prompt, next(rung.candidates for rung in found.rungs if prompt < rung.prompts))
        for prompt in range(60)
    ]
    assert [one.nodes for one in found.finished] == [29, 30, 31, 32]
    assert found.finished[toy(30)].tokens.tolist() == [[30.0]] * 60
    assert sorted(found.dropped.values()) == [4] * 16 + [8] * 8 + [16] * 4


def test_the_better_half_of_every_order_goes_on():
    found = halve([toy(n) for n in range(1, 17)], 8, ToyPlay(), rank_both_ways, Halving(2, 2))
    assert found.rungs == [Rung(2, 16), Rung(4, 16), Rung(8, 16)]
    found = halve([toy(n) for n in range(1, 4)], 8, ToyPlay(), rank_both_ways, Halving(2, 1))
    assert len(found.finished) == 3


def test_with_few_prompts_all_candidates_see_all():
    found = halve([toy(1), toy(3), toy(2)], 3, ToyPlay(), rank, Halving(first=8))
    assert found.rungs == [Rung(3, 3)] and found.dropped == {}


def test_nothing_to_play_is_no_rung():
    found = halve([], 3, ToyPlay(), rank, Halving())
    assert found.rungs == [] and found.finished == {} and found.dropped == {}


def test_more_candidates_see_all_prompts_unless_they_have():
    play, candidates = ToyPlay(), [toy(nodes) for nodes in range(1, 20)]
    found = halve(candidates, 9, play, rank, Halving(first=2, finalists=1))
    assert toy(4) not in found.finished and toy(19) in found.finished
    more = play_also(found, [toy(4), toy(25), toy(19)], 9, play)
    assert len(more.counts[toy(4)]) == len(more.counts[toy(25)]) == 9
    assert more.rungs[-1] == Rung(9, 2)
    assert play_also(more, [toy(4)], 9, play) is more
