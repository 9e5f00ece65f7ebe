"""Progress in a log file: a line at the beginning, every half minute, and at the end."""

from __future__ import annotations

import io

import pytest
import tqdm.std

from drafttrain.config.progress import tracking


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tqdm.std, "time", clock)
    return clock


def test_a_file_gets_a_line_every_half_minute_and_one_at_each_end(clock: Clock):
    out = io.StringIO()
    with tracking(350, "train quickstart", "step", done=100, out=out) as work:
        for step in range(250):
            clock.now += 0.25
            work.set_postfix_str(f"loss {step / 100:.3f}", refresh=False)
            work.update()
    counts = [line.split()[3] for line in out.getvalue().splitlines()]
    assert counts == ["100/350", "220/350", "340/350", "350/350"]
    assert out.getvalue().splitlines()[1].startswith("train quickstart:  63% 220/350 [00:30<00:32")
    assert out.getvalue().splitlines()[1].endswith("loss 1.190]")
    assert "\r" not in out.getvalue()


def test_nothing_is_written_where_another_process_prints():
    out = io.StringIO()
    with tracking(9, "distil", "row", shown=False, out=out) as work:
        work.update(9)
    assert out.getvalue() == ""
