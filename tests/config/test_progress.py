"""Progress in a log file: a line every half minute and one at the end."""

from __future__ import annotations

import io

import pytest

from drafttrain.config.progress import minutes, tracked, tracking


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_line_every_half_minute_and_one_at_the_end():
    clock, out = Clock(), io.StringIO()
    with tracking(250, "train quickstart", "step", out=out, clock=clock) as work:
        for step in range(250):
            clock.now += 0.25
            work.show(f"loss {step / 100:.3f}")
            work.update()
    assert out.getvalue().splitlines() == [
        "train quickstart: 120/250 steps, 48 %, 4.00 steps/s, 0:32 left, loss 1.190",
        "train quickstart: 240/250 steps, 96 %, 4.00 steps/s, 0:02 left, loss 2.390",
        "train quickstart: 250/250 steps, 100 %, 4.00 steps/s, 1:02 in all, loss 2.490",
    ]


def test_a_resumed_run_counts_on_and_its_speed_is_its_own():
    clock, out = Clock(), io.StringIO()
    with tracking(1000, "train run", "step", done=900, out=out, clock=clock) as work:
        clock.now += 40
        work.update(20)
    assert out.getvalue().splitlines() == [
        "train run: 920/1,000 steps, 92 %, 0.50 steps/s, 2:40 left",
        "train run: 920/1,000 steps, 92 %, 0.50 steps/s, 0:40 in all",
    ]


def test_work_that_fails_says_how_far_it_came():
    clock, out = Clock(), io.StringIO()
    with (
        pytest.raises(RuntimeError),
        tracking(9, "distil", "row", out=out, clock=clock) as work,
    ):
        clock.now += 2
        work.update(4)
        raise RuntimeError
    assert out.getvalue() == "distil: 4/9 rows, 44 %, 2.00 rows/s, 0:02 in all\n"


def test_nothing_is_written_where_nothing_was_done_or_another_process_prints():
    out = io.StringIO()
    with tracking(9, "distil", "row", out=out):
        pass
    with tracking(9, "distil", "row", shown=False, out=out) as work:
        work.update(9)
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar():
    out = Terminal()
    with tracking(3, "distil", "row", out=out) as work:
        work.show("7 tokens/s")
        work.update(3)
    assert "distil: 100%" in out.getvalue() and "7 tokens/s" in out.getvalue()


def test_tracked_items_come_in_order_and_are_counted(capsys):
    assert list(tracked(["a", "b", "c"], "replay", "input")) == ["a", "b", "c"]
    assert capsys.readouterr().err.startswith("replay: 3/3 inputs, 100 %")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (36.4, "0:36"), (754, "12:34"), (3725, "1:02:05")]
)
def test_durations_are_told_in_minutes(seconds, text):
    assert minutes(seconds) == text
