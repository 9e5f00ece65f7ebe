"""Prompts put to a server with a drafter and to one without, in turn, and the clock.

Prompts are asked in waves, each of which both servers get, one after the other; who is first
changes from wave to wave. With one prompt at once a wave is one prompt. A wave of several holds
some batches of them, since its start and its end are not full. No server is asked a prompt twice:
what it has kept of one would be read instead of computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from time import perf_counter

from drafttrain.data.servers.programs import Chunk, Program, Question, read_counters
from drafttrain.data.servers.transport import Connection, Unanswered

BATCHES = 4
"""Batches of prompts in a wave, where several are asked at once."""
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Side:
    """A server, and the lines to it: one for each prompt that is asked at once."""

    name: str
    program: Program
    model: str
    """Its name for the target."""
    connections: Sequence[Connection]


@dataclass(frozen=True)
class Asked:
    """One prompt's answer, timed."""

    made_tokens: int
    seconds: float
    """From the question to the end."""
    first_seconds: float
    """From the question to the first token."""
    tokens: tuple[int, ...]
    """As far as the server tells them."""
    draft_tokens: int | None = None
    accepted_tokens: int | None = None


@dataclass(frozen=True)
class Wave:
    """What one server made of a wave."""

    answers: Sequence[Asked]
    seconds: float
    draft_tokens: int | None
    accepted_tokens: int | None


def measure_level(
    sides: Sequence[Side],
    questions: Sequence[Question],
    concurrency: int,
    done: Callable[[int], None] = lambda prompts: None,
) -> list[list[Wave]]:
    """All waves of each side. done: told how many prompts a wave had. Raises Failure."""
    size = 1 if concurrency == 1 else BATCHES * concurrency
    waves: list[list[Wave]] = [[] for _ in sides]
    for number, start in enumerate(range(0, len(questions), size)):
        part = questions[start : start + size]
        order = list(zip(sides, waves, strict=True))
        for side, found in order if number % 2 == 0 else reversed(order):
            found.append(play(side, part, concurrency))
        done(len(part))
    return waves


def play(side: Side, questions: Sequence[Question], concurrency: int) -> Wave:
    """Ask a server these, so many at once. Raises Failure; what is under way is abandoned then."""
    before = _counters(side)
    tasks: SimpleQueue[tuple[int, Question]] = SimpleQueue()
    done: SimpleQueue[tuple[int, Asked] | Exception] = SimpleQueue()
    for task in enumerate(questions):
        tasks.put(task)
    stop = threading.Event()

    def work(connection: Connection) -> None:
        try:
            while not stop.is_set():
                place, question = tasks.get_nowait()
                done.put((place, ask(connection, side, question)))
        except Empty:  # all are asked
            return
        except Exception as error:
            done.put(error)

    threads = [
        threading.Thread(target=work, args=(connection,), daemon=True)
        for connection in side.connections[: min(concurrency, len(questions))]
    ]
    start = perf_counter()
    for thread in threads:
        thread.start()
    answers: dict[int, Asked] = {}
    try:
        while len(answers) < len(questions):
            item = done.get()
            if isinstance(item, Exception):
                raise item
            answers[item[0]] = item[1]
        seconds = perf_counter() - start
    finally:
        stop.set()
    for thread in threads:  # nothing is left to ask
        thread.join()
    ordered = [answers[place] for place in range(len(questions))]
    drafted, accepted = _counted(ordered, before, _counters(side))
    return Wave(ordered, seconds, drafted, accepted)


def ask(connection: Connection, side: Side, question: Question) -> Asked:
    """One prompt, streamed. Raises Failure, also for an answer of another shape."""
    program = side.program
    body = program.write(replace(question, model=side.model)) | program.streamed
    start, first = perf_counter(), None
    tokens: list[int] = []
    last = Chunk(False)
    try:
        for event in connection.stream(program.path, body):
            chunk = program.read_chunk(event)
            if chunk.holds_output and first is None:
                first = perf_counter() - start
            tokens += chunk.tokens
            last = chunk if chunk.made_tokens is not None else last
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise Unanswered(
            f"server {connection.address.url}: an answer of another shape than "
            f"{program.path} has ({type(error).__name__}: {error})"
        ) from None
    seconds = perf_counter() - start
    if not last.made_tokens:
        raise Unanswered(
            f"server {connection.address.url}: an answer that does not say of how many tokens it is"
        )
    return Asked(
        last.made_tokens,
        seconds,
        seconds if first is None else first,
        tuple(tokens),
        last.draft_tokens,
        last.accepted_tokens,
    )


def _counters(side: Side) -> dict[str, float]:
    """Of the whole server, where it has them. Raises Failure."""
    if side.program.counters is None:
        return {}
    connection = side.connections[0]
    try:
        return read_counters(connection.page(side.program.counters))
    except (ValueError, IndexError):
        raise Unanswered(
            f"server {connection.address.url}: {side.program.counters} holds no counters"
        ) from None


def _counted(
    answers: Sequence[Asked], before: dict[str, float], after: dict[str, float]
) -> tuple[int | None, int | None]:
    """Tokens drafted and accepted in a wave: as the answers say, else as the server counted.

    Both None where nothing was drafted, or nobody counts.
    """
    if DRAFTED in after:
        found = [int(after.get(name, 0) - before.get(name, 0)) for name in (DRAFTED, ACCEPTED)]
        return (found[0], found[1]) if found[0] > 0 else (None, None)
    told = [one for one in answers if one.draft_tokens is not None]
    if not told:
        return None, None
    return (
        sum(one.draft_tokens or 0 for one in told),
        sum(one.accepted_tokens or 0 for one in told),
    )


def shared_out(
    prompts: Sequence[Question], levels: int, warmup: int
) -> tuple[Sequence[Question], list[Sequence[Question]]]:
    """The first ones to warm up with, and every level's own: each prompt belongs to one of them."""
    rest = prompts[warmup:]
    return prompts[:warmup], [rest[level::levels] for level in range(levels)]


def identical_outputs(waves: Sequence[Sequence[Wave]]) -> Iterator[bool]:
    """Of each prompt, whether both servers gave the same tokens, where both tell them."""
    ours, theirs = ([one for wave in side for one in wave.answers] for side in waves)
    for a, b in zip(ours, theirs, strict=True):
        if a.tokens and b.tokens:
            yield a.tokens == b.tokens
