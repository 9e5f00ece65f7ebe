"""Rows shared out among servers: many questions at once, asked again where a server is in trouble.

A row is given up only where the server that failed it is alive and does not say that it has too
much to do. Where none is left the whole run ends: what was written is whole, and it can be resumed.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafttrain.data.distill.batches import Decoded, Refused
from drafttrain.data.servers.probe import MODELS
from drafttrain.data.servers.transport import (
    PROBE_SECONDS,
    Connection,
    Denied,
    Failure,
    RowRefused,
    Unanswered,
)
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.data.shards.writing import say

LONGEST_WAIT = 60.0
"""Seconds between two questions, at most; a server may ask for more, up to five times as much."""
FEW = 4
"""Rows of a batch from which on it is no accident that all fail."""


class ServersGone(OSError):
    """No server answers any more; what was finished is kept."""


@dataclass
class Worked:
    """A server and whether it still answers."""

    connect: Callable[[], Connection]
    ask: Callable[[Connection, ShardRow], Decoded]
    """Raises Failure."""
    gone: str = ""
    """Why no more is asked of it."""


@dataclass
class _Task:
    place: int
    row: ShardRow
    attempts: int = 0


@dataclass
class Workers:
    """Threads that ask servers: `concurrency` for each of them."""

    servers: Sequence[Worked]
    concurrency: int
    retries: int
    backoff: float
    """Seconds before a question is asked for the second time; twice as many before each next."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, rows: Sequence[ShardRow]) -> list[Decoded]:
        """The answer to each row, in order.

        Raises ServersGone where none is left, or all of several rows fail: no shard is written
        then. An interruption ends it at once, questions under way are abandoned.
        """
        found: dict[int, Decoded] = {}
        tasks: queue.Queue[_Task] = queue.Queue()
        done: queue.Queue[tuple[int, Decoded] | Exception] = queue.Queue()
        stop = threading.Event()
        for place, row in enumerate(rows):
            tasks.put(_Task(place, row))
        threads = [
            threading.Thread(target=self._work, args=(server, tasks, done, stop), daemon=True)
            for server in self.servers
            for _ in range(0 if server.gone else min(self.concurrency, len(rows)))
        ]
        for thread in threads:
            thread.start()
        try:
            while len(found) < len(rows):
                item = done.get()
                if isinstance(item, Exception):
                    raise item
                found[item[0]] = item[1]
        finally:
            stop.set()
        for thread in threads:  # none is asking: one that woke while Python ends would abort it
            thread.join()
        failed = [one.reason for one in found.values() if isinstance(one, Refused)]
        if len(failed) == len(rows) >= FEW:
            raise ServersGone(f"all of {len(rows)} rows failed, the first one: {failed[0]}")
        return [found[place] for place in range(len(rows))]

    def _work(
        self, server: Worked, tasks: queue.Queue, done: queue.Queue, stop: threading.Event
    ) -> None:
        connection = server.connect()
        try:
            while not (stop.is_set() or server.gone):
                try:
                    task = tasks.get(timeout=0.05)
                except queue.Empty:  # others may hand theirs back
                    continue
                pause = self._try(server, connection, task, tasks, done)
                stop.wait(pause)
        except Exception as error:
            done.put(error)
        finally:
            connection.close()

    def _try(
        self,
        server: Worked,
        connection: Connection,
        task: _Task,
        tasks: queue.Queue,
        done: queue.Queue,
    ) -> float:
        """Ask for one row; how long to wait before the next one."""
        try:
            done.put((task.place, server.ask(connection, task.row)))
        except RowRefused as failure:
            done.put((task.place, Refused(str(failure))))
        except Denied as failure:
            self._retire(server, task, str(failure), tasks, done)
        except Unanswered as failure:
            task.attempts += 1
            if task.attempts <= self.retries:
                tasks.put(task)
                return self._pause(task.attempts, failure.wait)
            if failure.overloaded or not is_alive(connection):
                self._retire(server, task, str(failure), tasks, done)
            else:
                done.put((task.place, Refused(f"{failure}, {task.attempts} times")))
        return 0.0

    def _pause(self, attempts: int, asked: float | None) -> float:
        if asked is not None:
            return min(asked, 5 * LONGEST_WAIT)
        seconds = min(self.backoff * 2.0 ** (attempts - 1), LONGEST_WAIT)
        return seconds * random.uniform(0.5, 1.0)  # not all at once

    def _retire(
        self, server: Worked, task: _Task, reason: str, tasks: queue.Queue, done: queue.Queue
    ) -> None:
        """Ask no more of a server; its row goes to another one, if there is one."""
        with self._lock:
            first, server.gone = not server.gone, reason
            left = [other for other in self.servers if not other.gone]
        if not left:
            done.put(
                ServersGone(
                    f"{reason}; what was finished is kept: see to the server and run the same "
                    "command again, it continues"
                )
            )
            return
        if first:
            say(f"{reason}; going on with {len(left)} other servers")
        tasks.put(_Task(task.place, task.row))


def is_alive(connection: Connection) -> bool:
    """Whether a server still says which models it has."""
    try:
        connection.ask(MODELS, timeout=PROBE_SECONDS)
    except Failure:
        return False
    return True
