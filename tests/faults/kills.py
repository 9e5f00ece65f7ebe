"""Kills stages at random points, runs them again to the end and checks the results."""

import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets

from tests.faults.forks import Ended, Point, call_in_child, run_in_child
from tests.faults.stages import STAGES, damage, differences, make_inputs, newest_step

INTERRUPTED = 130


@dataclass
class Account:
    """Results of the signals sent to a stage."""

    whole: Path
    """Folder of the uninterrupted run."""
    uninterrupted: Ended
    work: Callable[[], None]
    counts: Counter = field(default_factory=Counter)
    """Signals sent, completed runs, and those whose folders equal the uninterrupted one's."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of the failed checks."""


def prepare(base: Path, stages: Sequence[str]) -> dict[str, Account]:
    """Makes the inputs in `base` and runs each stage once without interruption."""
    # not the user's cache: its files are cut too
    datasets.config.HF_DATASETS_CACHE = base / "cache"
    call_in_child(lambda: make_inputs(base), base)
    wholes = {}
    for name in stages:
        folder, work = base / "whole" / name, lambda run=STAGES[name]: run(base)
        folder.mkdir(parents=True)
        ended = run_in_child(work, folder, base / f"{name}.log")
        assert ended.status == 0 and ended.operations is not None, ended.printed
        wholes[name] = Account(folder, ended, work)
    return wholes


def random_point(randomness: random.Random, whole: Ended, number: int) -> Point:
    """Chooses a point by time, by file operation or, for kill -9, in the middle of a file, with
    probability 1/3 each."""
    kind = randomness.choice(("clock", "operation", "torn"))
    if kind == "clock":
        return Point(seconds=randomness.uniform(0.0, whole.seconds))
    operation = randomness.randint(1, whole.operations)
    if kind == "torn" and number == signal.SIGKILL:
        return Point(operation=operation, torn=int(10 ** randomness.uniform(0.0, 3.5)))
    return Point(operation=operation)


def break_off(
    base: Path, wholes: dict[str, Account], signals: int, number: int, seed: int
) -> dict[str, Account]:
    """Interrupts runs one to three times at random points, then finishes them."""
    accounts = {
        name: Account(one.whole, one.uninterrupted, one.work) for name, one in wholes.items()
    }
    randomness, sent, trial = random.Random(seed), 0, 0
    while sent < signals:
        name = randomness.choice(list(accounts))
        account, work = accounts[name], base / f"{signal.Signals(number).name}-{trial}"
        work.mkdir()
        for _ in range(min(randomness.randint(1, 3), signals - sent)):
            point = random_point(randomness, account.uninterrupted, number)
            ended = run_in_child(account.work, work, base / f"{work.name}.log", point, number)
            if ended.status == 0:
                break  # finished before the signal
            wrong = call_in_child(lambda: damage(name, work, account.whole), base)  # noqa: B023
            wrong += wrong_end(ended, number, work)
            account.wrong += [f"{name} at {point} in {work.name}: {one}" for one in wrong]
            sent += 1
            account.counts["signals"] += 1
        finish(base, work, name, account)
        if not account.wrong:
            shutil.rmtree(work)
        trial += 1
    return accounts


def wrong_end(ended: Ended, number: int, work: Path) -> list[str]:
    """Returns what is wrong with how a run ended: killed, or by SIGTERM with one line that says how
    to continue and which checkpoint there is."""
    left = f"left with {ended.status}: {ended.printed[-500:]}"
    if number == signal.SIGKILL:
        return [] if ended.status in (-signal.SIGKILL, -signal.SIGXFSZ) else [left]
    if ended.status == -signal.SIGTERM:  # it had not begun
        return []
    line = (ended.printed.strip().splitlines() or [""])[-1]
    if ended.status != INTERRUPTED or not re.search("interrupted|run the same command", line):
        return [left]
    stopped = re.search(r"stopped at step (\d+)", line)
    if stopped and newest_step(work) != int(stopped[1]):
        return [f"{line!r}, but the newest checkpoint is of step {newest_step(work)}"]
    return []


def finish(base: Path, work: Path, name: str, account: Account) -> None:
    """Runs to the end and compares with the uninterrupted run."""
    ended = run_in_child(account.work, work, base / f"{work.name}.log")
    if ended.status != 0:
        account.wrong.append(f"{work.name}: {name} again: {ended.printed[-1000:]}")
    other = call_in_child(lambda: differences(work, account.whole), base)
    if other:
        account.wrong.append(f"{work.name}: {name} differs in {', '.join(other[:5])}")
    account.counts["runs"] += 1
    account.counts["identical"] += ended.status == 0 and not other
