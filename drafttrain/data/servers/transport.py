"""JSON over HTTP to one server, and what its failures mean.

Only the standard library. The API key comes from an environment variable and leaves in a header
alone: what a server says is shown without it.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from drafttrain.config.base import ConfigError

KEYS = ("DRAFTTRAIN_API_KEY", "OPENAI_API_KEY")
"""Environment variables that the API key is read from, the first one first."""
SHOWN = 160
"""Characters of a server's own words in a message."""
PROBE_SECONDS = 10.0
"""How long a server has to say which models it has."""
LARGEST = 64 * 2**20
"""Bytes of an answer, at most."""
DENIED = {
    401: f"asks for a key: set {KEYS[0]} (or {KEYS[1]}) in the environment, or correct it",
    403: f"forbids this: check the key in {KEYS[0]} (or {KEYS[1]})",
    404: "knows no such page or model: give the address that ends in /v1, and check server.model",
    405: "does not take questions there: give the address that ends in /v1",
}


class Failure(Exception):
    """Why a server gave no answer; the message is for users."""


class Denied(Failure):
    """No row would be answered; asking again is of no use."""


class RowRefused(Failure):
    """The server takes no such row."""


class Unanswered(Failure):
    """It may answer when it is asked again."""

    def __init__(self, message: str, wait: float | None = None, overloaded: bool = False) -> None:
        super().__init__(message)
        self.wait = wait
        """Seconds that the server asks to wait."""
        self.overloaded = overloaded
        """Whether the server said that it has too much to do: no fault of the row."""


@dataclass(frozen=True)
class Address:
    """Where a server is, without anything secret."""

    scheme: str
    host: str
    port: int
    root: str
    """Path before /v1."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.root}"


def read_address(text: str) -> Address:
    """The address of a server, with or without /v1. Raises ConfigError, naming nothing secret."""
    try:
        parts = urlsplit(text if "//" in text else f"http://{text}")
        port = parts.port
    except ValueError:
        raise ConfigError(
            "server.urls: one of them is no address; give one as http://localhost:8000/v1"
        ) from None
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"server.urls: the address of {parts.hostname!r} holds more than host, port and path, "
            f"perhaps a secret; leave it out, and give a key in {KEYS[0]}"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"server.urls = {text!r} is no address; give one as http://localhost:8000/v1"
        )
    root = parts.path.rstrip("/").removesuffix("/v1")
    return Address(
        parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), root
    )


def read_key() -> str | None:
    """The API key, where the environment has one. Raises ConfigError for what no header takes."""
    for name in KEYS:
        if key := os.environ.get(name, "").strip():
            if not (key.isascii() and key.isprintable()):
                raise ConfigError(f"{name} holds characters that no key has; set it anew")
            return key
    return None


@dataclass
class Connection:
    """A line to one server, for one thread."""

    address: Address
    timeout: float
    key: str | None = field(default=None, repr=False)
    _line: http.client.HTTPConnection | None = None

    def ask(
        self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> Any:
        """The JSON that the server answers, to a POST of the body or a GET. Raises Failure."""
        content = self._content(path, body, self.timeout if timeout is None else timeout)
        try:
            return json.loads(content)
        except ValueError:
            raise Unanswered(self._says(f"no JSON but {_quoted(content)}")) from None

    def page(self, path: str) -> str:
        """What the server answers to a GET, as text. Raises Failure."""
        return self._content(path, None, self.timeout).decode("utf-8", "replace")

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """The JSON of each server-sent event of an answer, as it comes. Raises Failure.

        `timeout` is on the whole answer.
        """
        whole = False
        try:
            with self._in_words(self.timeout):
                ends, response = self._send(path, body, self.timeout)
                if response.status != http.client.OK:
                    said = self._rest(response, ends)
                    raise self._failure(response.status, response.headers, said)
                while line := self._without_key(response.readline(LARGEST)):
                    if time.monotonic() > ends:
                        raise TimeoutError
                    word, _, value = line.strip().partition(b":")
                    if word == b"data" and value.strip() == b"[DONE]":
                        break
                    if word and word not in (b"event", b"id", b"retry"):
                        yield self._event(line, value if word == b"data" else b"")
                self._rest(response, ends)
            whole = True
        finally:
            if not whole:  # what is left of the answer would be taken for the next one's
                self.close()

    def _event(self, line: bytes, value: bytes) -> Any:
        try:
            return json.loads(value)
        except ValueError:
            raise Unanswered(self._says(f"no event but {_quoted(line)}")) from None

    def _content(self, path: str, body: dict[str, Any] | None, limit: float) -> bytes:
        """The whole of an answer. Raises Failure."""
        with self._in_words(limit):
            ends, response = self._send(path, body, limit)
            content = self._rest(response, ends)
        if response.status != http.client.OK:
            raise self._failure(response.status, response.headers, content)
        return content

    @contextmanager
    def _in_words(self, limit: float) -> Iterator[None]:
        """Errors of the line as failures; it is closed then."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise Unanswered(self._says(f"no answer within {limit:g} s")) from None
        except (OSError, http.client.HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unanswered(self._says(f"the connection failed ({reason})")) from None

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _send(
        self, path: str, body: dict[str, Any] | None, limit: float
    ) -> tuple[float, http.client.HTTPResponse]:
        """One question on the open line, or a new one; when it must be answered, and the answer.

        Servers hang up on lines that lie idle for some seconds: then it is asked on a new one.
        """
        ends, idle = time.monotonic() + limit, self._line is not None
        if self._line is None:
            kind = http.client.HTTPConnection
            if self.address.scheme == "https":
                kind = http.client.HTTPSConnection
            self._line = kind(self.address.host, self.address.port, timeout=limit)
        line = self._line
        if line.sock is not None:
            line.sock.settimeout(limit)
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else json.dumps(body)
        method = "GET" if body is None else "POST"
        try:
            line.request(method, self.address.root + path, body=content, headers=headers)
            return ends, line.getresponse()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            if not idle:
                raise
            self.close()
            return self._send(path, body, limit)

    def _rest(self, response: http.client.HTTPResponse, ends: float) -> bytes:
        """What is left of an answer; the line can be used again then."""
        parts: list[bytes] = []
        while part := response.read1(2**16):
            parts.append(part)
            if time.monotonic() > ends:
                raise TimeoutError
            if sum(map(len, parts)) > LARGEST:
                raise http.client.HTTPException(f"an answer of more than {LARGEST} bytes")
        if response.length:  # said to be longer: the other side has hung up
            raise http.client.HTTPException("cut off in the middle of an answer")
        response.close()  # read1 leaves it open, and the line could not be used again
        if response.will_close:
            self.close()
        return self._without_key(b"".join(parts))

    def _without_key(self, content: bytes) -> bytes:
        """Servers repeat what they refuse."""
        return content if self.key is None else content.replace(self.key.encode(), b"***")

    def _failure(self, status: int, headers: http.client.HTTPMessage, content: bytes) -> Failure:
        if status in DENIED:
            return Denied(self._says(f"{DENIED[status]} ({status}: {_reason(content)})"))
        said = self._says(f"{status}: {_reason(content)}")
        if status in (408, 425, 429) or status >= 500:
            wait = headers.get("Retry-After", "")
            seconds = float(wait) if wait.isdecimal() else None
            return Unanswered(said, seconds, overloaded=status in (429, 503))
        if status >= 400:
            return RowRefused(said)
        return Denied(self._says(f"{status} instead of an answer: give its own address"))

    def _says(self, what: str) -> str:
        return f"server {self.address.url}: {what}"


def _reason(content: bytes) -> str:
    """What a server says of an error, in one line."""
    try:
        found = json.loads(content)
        for name in ("error", "message", "detail"):
            while isinstance(found, dict) and name in found:
                found = found[name]
    except ValueError:
        return _quoted(content)
    return _quoted(found if isinstance(found, str) else json.dumps(found))


def _quoted(text: bytes | str) -> str:
    shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    shown = " ".join(shown.split())
    return repr(shown[:SHOWN] + ("…" if len(shown) > SHOWN else ""))
