"""The search of `drafttrain tune`, with candidates of known speed and a scripted clock."""

from collections.abc import Sequence

import numpy as np
import pytest

from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import CascadeConfig, DecodeConfig, SamplingConfig, StopConfig
from drafttrain.config.kinds import CAUSAL, KINDS, SPEC_DRAFTER, DrafterKind
from drafttrain.config.methods import STOPS
from drafttrain.config.policy import dump_policy
from drafttrain.evaluation.report import Choice
from drafttrain.evaluation.tune import FEWEST, FIRST, choose, finalists, halve, policy_of, search
from drafttrain.evaluation.tune_plan import MOST, Candidate, Drafting, make_candidates
from tests.evaluation.reports import tried


class Race:
    """Candidates of known speeds (tokens per second), 100 tokens per prompt, with random times.

    noise: standard deviation of the logarithm of a candidate's time for a prompt. common: that of
    the factor which all candidates share for a prompt.
    """

    def __init__(self, speeds: dict[str, float], noise: float = 0.0, common: float = 0.0) -> None:
        self.speeds, self.noise, self.common = speeds, noise, common
        self.time = 0.0
        self.decoded: list[tuple[tuple[str, ...], list[int], int]] = []

    def decode(self, names: Sequence[str], places: Sequence[int], turn: int):
        self.decoded.append((tuple(names), list(places), turn))
        found = {}
        for number, name in enumerate(names):
            seconds = np.array([self._seconds(number, name, place, turn) for place in places])
            self.time += seconds.sum()
            each = np.ones(len(places))
            found[name] = np.stack([100 * each, seconds, 30 * each, 90 * each, 70 * each])
        return found

    def _seconds(self, number: int, name: str, place: int, turn: int) -> float:
        shared = np.random.default_rng([place, turn]).normal(scale=self.common)
        own = np.random.default_rng([place, turn, 1 + number]).normal(scale=self.noise)
        return 100.0 / self.speeds[name] * float(np.exp(shared + own))

    def run(self, prompts: int = 1000, seconds: float = 1e9, fixed: Sequence[str] = (), **given):
        first, names = sum(100.0 / speed for speed in self.speeds.values()), list(self.speeds)
        decode, left = self.decode, lambda: seconds - self.time
        return search(names, fixed, prompts, decode, left, first, **given)


def many(count: int) -> dict[str, float]:
    return {f"c{i}": 100.0 + i for i in range(count)}


def test_the_fastest_is_left_and_every_rung_decodes_twice_as_many_new_prompts():
    race = Race(many(16))
    rungs = race.run(fixed=["c0", "c3"])
    assert [len(rung.candidates) for rung in rungs] == [16, 9, 5, 3, 2]
    assert [rung.prompts for rung in rungs] == [8, 24, 56, 120, 248]
    assert next(iter(rungs[-1].candidates)) == "c15"
    seen = [place for _, places, _ in race.decoded for place in places]
    assert len(seen) == len(set(seen)), "no prompt is decoded twice while there are new ones"


def test_tune_keeps_the_best_fixed_length():
    rungs = Race(many(16)).run(fixed=["c0", "c3", "c1"])
    assert set(rungs[-1].candidates) == {"c15", "c3"}
    rungs = Race(many(16)).run(fixed=["c15", "c3"])
    assert set(rungs[-1].candidates) == {"c15", "c14"}, "it is the fastest: another one is compared"


def test_noise_that_prompts_share_does_not_count():
    """Tests pairing: times differ tenfold between prompts, by 3 % between candidates."""
    rungs = Race({"plain": 60, "a": 100, "b": 103}, noise=0.01, common=1.0).run()
    b, a = list(rungs[-1].candidates)[:2]
    assert (b, a) == ("b", "a")
    assert rungs[-1].candidates["a"].against_best.high < 1.0
    wide = rungs[-1].candidates["a"].tokens_per_second
    assert wide.high > 1.5 * wide.low


def test_those_beyond_doubt_slower_leave_first():
    standings = {"best": tried(1.0, 1.0), "slower": tried(0.95, 0.97)}
    standings |= {"doubtful": tried(0.9, 1.05), "slowest": tried(0.8, 0.85)}
    for fixed in ([], ["slowest"]):
        staying = {name for name, one in halve(standings, fixed).items() if one.stays}
        assert staying == {"best", "doubtful", *fixed}


def test_the_time_is_kept():
    slow = Race(many(16))
    rungs = slow.run(seconds=400.0)  # 15 s per prompt for all: four rungs of 100 s
    assert 300.0 < slow.time <= 400.0
    assert rungs[0].prompts == 6 < FIRST and len(rungs[-1].candidates) == 2
    assert Race(many(16)).run(seconds=50.0) == [], "no time to compare on four prompts"


def test_a_required_search_compares_on_the_fewest_prompts_however_little_time_there_is():
    [rung] = Race(many(16)).run(seconds=50.0, required=True)
    assert rung.prompts == FEWEST and len(rung.candidates) == 16


def test_prompts_come_again_from_other_seeds_once_all_were_decoded():
    race = Race(many(9))
    race.run(prompts=10)
    turns = [(turn, len(places)) for _, places, turn in race.decoded]
    assert turns == [(0, 8), (0, 2), (1, 10), (2, 10)]
    for turn in range(3):
        places = [place for _, some, own in race.decoded if own == turn for place in some]
        assert sorted(places) == list(range(10))


def test_a_larger_batch_size_begins_with_four_batches():
    race = Race(many(4))
    assert race.run(batch_size=16)[0].prompts == 64


def candidate(name: str, head: str | None = None, **parts: object) -> Candidate:
    return Candidate(name, DecodeConfig(drafter="x", **parts), head)


def test_the_choice_is_the_best_of_each_kind_of_those_that_stayed_longest():
    candidates = [
        candidate("k=2", stop=StopConfig(k=2)),
        candidate("k=4", stop=StopConfig(k=4)),
        candidate("head", "D1-w1", stop=StopConfig(kind="head", head="x", h=0.5)),
        candidate("deep", cascade=CascadeConfig(drafters=("max-gram",))),
    ]
    race = Race({"plain": 50, "k=2": 80, "k=4": 90, "head": 70, "deep": 100})
    rungs = race.run(fixed=["k=2", "k=4"])
    [found] = choose(rungs, candidates)
    assert (found.best, found.best_chain, found.best_fixed) == ("deep", "k=4", "k=4")
    assert found.best_head == "head"
    assert finalists(rungs, [found]) == ["deep", "k=4", "head"]  # k=2 left after the first rung


def test_a_policy_decodes_what_was_measured():
    own = {"cascade": {"drafters": ["max-gram"]}, "verifier": {"kind": "block"}}
    deep = candidate("deep", **own, sampling=SamplingConfig(temperature=1.0))
    found = Choice(batch_size=1, best="deep", best_chain="k=2", best_fixed="k=2", best_head=None)
    chain = candidate("k=2", stop=StopConfig(k=2))
    policy = policy_of(found, {"deep": deep, "k=2": chain}, {"temperature": 1.0})
    assert dump_policy(policy)["method"] == deep.settings()
    assert deep.settings()["verifier"] == {"kind": "block"}


def drafting(kind: DrafterKind) -> Drafting:
    return Drafting(kind, 10 if kind.drafts == "blocks" else None, kind.tree_rows is not None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [name for name in KINDS if name != "none"])
def test_every_kind_of_drafter_has_candidates_that_fit_it(name, temperature):
    kind = KINDS[name]
    settings = TuneConfig(drafter="x", sampling=SamplingConfig(temperature=temperature))
    heads = {"D1-w1": "heads/D1-w1"} if "hidden" in kind.provides else {}
    found = make_candidates(settings, drafting(kind), heads, 0.85)
    assert len(found) < MOST and len({one.name for one in found}) == len(found)
    for one in found:
        stop = STOPS[one.decode.stop.kind]
        assert temperature == 0.0 or not stop.greedy_only
        assert one.is_chain or kind.tree_rows is not None
        assert one.is_chain is False or stop.requires <= kind.provides
        if kind.drafts == "blocks":
            assert max(one.decode.stop.k if stop.name == "fixed" else 0, 1) <= 10
        block = one.decode.verifier.kind == "block"
        assert block == one.name.endswith(" block") and (temperature > 0.0 or not block)
    assert any(one.head for one in found) == bool(heads)
    assert {one.decode.stop.h for one in found if one.head} <= {0.3, 0.5, 0.7, 0.85, None}
    for threshold in (1e-4, 0.9999):  # h excludes 0 and 1
        assert make_candidates(settings, drafting(kind), heads, threshold)


def test_the_candidates_of_a_block_drafter_end_with_its_own_length():
    settings = TuneConfig(drafter="x", sampling=SamplingConfig())
    found = make_candidates(settings, drafting(SPEC_DRAFTER), {}, None)
    assert [one.decode.stop.k for one in found if one.is_fixed] == [2, 3, 4, 6, 8, 10]


def test_users_give_candidates_of_their_own():
    deep = DecodeConfig(cascade=CascadeConfig(drafters=("max-gram",), increments="5,0/10"))
    settings = TuneConfig(drafter="x", sampling=SamplingConfig(), candidates={"deep": deep})
    [found] = [c for c in make_candidates(settings, drafting(CAUSAL), {}, None) if c.name == "deep"]
    assert found.decode.drafter == "x" and found.decode.cascade.increments == ((5, 0), (10,))
