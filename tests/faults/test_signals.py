"""SIGTERM and Ctrl-C at any time end with one line that says how to continue."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from drafttrain.cli import app
from drafttrain.commands.shell import run_command
from drafttrain.training import stop_signal
from drafttrain.training.stop_signal import StopSignal

ALONE = SimpleNamespace(num_processes=1)


@pytest.fixture(autouse=True)
def _handlers():
    """Restores signal handlers after each test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_launcher_repeats_at_once_counts_once(number):
    with StopSignal() as stop:
        assert not stop.seen(ALONE)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.seen(ALONE)


def test_only_a_later_ctrl_c_leaves_at_once(monkeypatch):
    monkeypatch.setattr(stop_signal, "IMPATIENT", -1.0)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.seen(ALONE)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_processes_stop_together_a_step_after_any_got_the_signal():
    """No process acts on its own flag: flags are summed in each step and read one step later."""
    others = iter([0.0, 1.0, 0.0, 0.0])

    def reduce(flag: torch.Tensor, reduction: str) -> torch.Tensor:
        return flag + next(others)

    pair = SimpleNamespace(num_processes=2, device=torch.device("cpu"), reduce=reduce)
    with StopSignal() as stop:
        seen = [stop.seen(pair) for _ in range(3)]
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(stop.seen(pair))
    assert seen == [False, False, True, False]
    assert bool(stop.flag[0] > 0)  # read one step later


@pytest.mark.parametrize(("resumable", "says"), [(True, "; run the same"), (False, "")])
def test_sigterm_ends_a_command_in_one_line(monkeypatch, capsys, resumable, says):
    monkeypatch.setattr(
        "drafttrain.commands.options.load_settings", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(SystemExit) as left:
        run_command(app, "drafttrain", ["distill"], resumable)
    printed = capsys.readouterr().err.splitlines()
    assert left.value.code == 130
    assert len(printed) == 1 and printed[0].startswith(f"drafttrain: interrupted{says}")
