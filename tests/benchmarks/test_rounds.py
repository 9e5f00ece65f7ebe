"""Where the time of a round goes: every second counts once, and growth is told apart by cause."""

from __future__ import annotations

import pytest

from benchmarks.round_clock import Clock
from benchmarks.rounds import is_outside, median_of_repeats, summarise_histories


class Work:
    """What takes time: by its own clock, a second a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def outer(self) -> None:
        self.seconds += 2
        self.inner()
        self.seconds += 1

    def inner(self) -> None:
        self.seconds += 5


def test_a_part_does_not_count_the_time_of_parts_inside_it() -> None:
    work = Work()
    clock = Clock(work.now)
    with clock.timed(Work, "outer", "outside"), clock.timed(Work, "inner", "target calls"):
        work.outer()
        clock.phase("verification")
        work.seconds += 4
        clock.next_round()
        work.inner()
        clock.next_round()
    first, second = clock.rounds
    assert {part: s for part, s in first.items() if s} == {
        "outside": 3,
        "target calls": 5,
        "verification": 4,
    }
    assert {part: s for part, s in second.items() if s} == {"target calls": 5}


def test_a_round_is_the_median_of_its_repeats() -> None:
    repeats = [[{"commit": float(i), "target calls": 1.0}, {"commit": 2.0}] for i in (9, 1, 3)]
    assert median_of_repeats(repeats, is_outside).tolist() == [3.0, 2.0]


def test_growth_is_split_into_attention_and_the_rest() -> None:
    short = [{"attention": 0.001, "target calls": 0.004, "commit": 0.001}] * 5
    long = [{"attention": 0.004, "target calls": 0.004, "commit": 0.002}] * 5
    first, second = summarise_histories({256: short, 1024: long})
    assert first["round ms"]["value"] == pytest.approx(6.0)
    assert second["growth beside attention ms"]["value"] == pytest.approx(1.0)
    assert second["attention's share of growth"]["value"] == pytest.approx(0.75)
