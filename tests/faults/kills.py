"""Kills stages at random points, runs them again to the end and checks the results."""

import random
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets

from tests.faults.forks import Point, call_in_child, run_in_child
from tests.faults.stages import (
    STAGES,
    damage,
    differences,
    lost_and_doubled,
    make_inputs,
    newest_step,
)

INTERRUPTED = 130


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run of a stage."""

    folder: Path
    seconds: float
    operations: int


@dataclass
class Account:
    """Results of the signals sent to a stage."""

    signals: int = 0
    runs: int = 0
    """Completed runs, each after one or more signals."""
    lost: int = 0
    doubled: int = 0
    identical: int = 0
    """Finished folders equal to those of the uninterrupted run, byte for byte."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of the failed checks."""


def prepare(base: Path, stages: Sequence[str]) -> dict[str, Whole]:
    """Makes the inputs in `base` and runs each stage once without interruption."""
    base.mkdir(parents=True, exist_ok=True)
    datasets.config.HF_DATASETS_CACHE = (
        base / "cache"
    )  # not the user's cache: its files are cut too
    call_in_child(lambda: make_inputs(base), base)
    wholes = {}
    for stage in stages:
        folder = base / "whole" / stage
        folder.mkdir(parents=True)
        ended = run_in_child(lambda run=STAGES[stage]: run(base), folder, base / f"{stage}.log")
        assert ended.status == 0, ended.printed
        assert ended.operations is not None
        wholes[stage] = Whole(folder, ended.seconds, ended.operations)
    return wholes


def random_point(randomness: random.Random, whole: Whole, number: int) -> Point:
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
    base: Path, wholes: dict[str, Whole], signals: int, number: int, seed: int
) -> Iterator[tuple[str, Account]]:
    """Yields after each run its stage and the account of that stage so far.

    A run is interrupted one to three times at random points, then finished.
    """
    randomness = random.Random(seed)
    accounts = {name: Account() for name in wholes}
    sent, trial = 0, 0
    while sent < signals:
        name = randomness.choice(list(wholes))
        account = accounts[name]
        work = base / f"{signal.Signals(number).name}-{trial}"
        work.mkdir()
        for _ in range(min(randomness.randint(1, 3), signals - sent)):
            point = random_point(randomness, wholes[name], number)
            if not _break_once(base, work, name, wholes[name], point, number, account):
                break  # finished before the signal
            sent, account.signals = sent + 1, account.signals + 1
        finish(base, work, name, wholes[name], account)
        if not account.wrong:
            shutil.rmtree(work)
        trial += 1
        yield name, account


def _break_once(
    base: Path, work: Path, stage: str, whole: Whole, point: Point, number: int, account: Account
) -> bool:
    """Sends one run a signal and returns whether it came before the end."""
    ended = run_in_child(
        lambda: STAGES[stage](base), work, base / f"{work.name}.log", point, number
    )
    if ended.status == 0:
        return False
    wrong = call_in_child(lambda: damage(stage, work, whole.folder), base)
    if number == signal.SIGKILL and ended.status not in (-signal.SIGKILL, -signal.SIGXFSZ):
        wrong.append(f"ended by itself with {ended.status}: {ended.printed[-500:]}")
    if number == signal.SIGTERM and ended.status != -signal.SIGTERM:  # else it had not begun
        line = (ended.printed.strip().splitlines() or [""])[-1]
        stopped = re.search(r"stopped at step (\d+)", line)
        if ended.status != INTERRUPTED or not re.search("interrupted|run the same command", line):
            wrong.append(f"left with {ended.status}: {ended.printed[-500:]}")
        elif stopped and newest_step(work) != int(stopped[1]):
            wrong.append(f"{line!r}, but the newest checkpoint is of step {newest_step(work)}")
    account.wrong += [f"{stage} at {point} in {work.name}: {one}" for one in wrong]
    return True


def finish(base: Path, work: Path, stage: str, whole: Whole, account: Account) -> None:
    """Runs to the end and compares with the uninterrupted run."""
    ended = run_in_child(lambda: STAGES[stage](base), work, base / f"{work.name}.log")
    if ended.status != 0:
        account.wrong.append(f"{work.name}: {stage} again: {ended.printed[-1000:]}")
    lost, doubled = call_in_child(lambda: lost_and_doubled(stage, work), base)
    other = call_in_child(lambda: differences(work, whole.folder), base)
    account.runs += 1
    account.lost += lost
    account.doubled += doubled
    account.identical += ended.status == 0 and not other
    if other:
        account.wrong.append(f"{work.name}: {stage} differs in {', '.join(other[:5])}")
