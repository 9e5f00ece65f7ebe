"""Lines to servers: kept open, and opened anew where the server has hung up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from drafttrain.data.servers.transport import Connection, Unanswered, read_address

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def hanging_up(answers: list[int]) -> Iterator[str]:
    """A server that answers so many questions on each line, keeps it open, and then hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for questions in answers:
                line, _ = server.accept()
                with line:
                    for _ in range(questions):
                        line.recv(2**16)
                        line.sendall(ANSWER)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(timeout=60)


def test_a_line_that_the_server_has_left_is_opened_anew() -> None:
    with hanging_up([1, 2]) as url:
        line = Connection(read_address(url), 30.0)
        for _ in range(3):
            assert line.ask("/health") == {}
        line.close()


def test_a_new_line_that_is_not_answered_is_a_failure_at_once() -> None:
    with hanging_up([1, 0]) as url:
        line = Connection(read_address(url), 30.0)
        assert line.ask("/health") == {}
        with pytest.raises(Unanswered, match="the connection failed"):
            line.ask("/health")
