"""A tiny OpenAI-compatible server on loopback, with faults on request."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.tiny_models import EOS

AT_ONCE = {"retry-after-ms": "1"}
"""Header that makes the client retry without a pause."""


@dataclass
class Fake:
    """The server's answers and faults, and a record of its requests."""

    outputs: Mapping[tuple[int, ...], Sequence[int]]
    """The target's output tokens by prompt."""
    tokenizer: PreTrainedTokenizerBase
    models: Any = ("tiny",)
    trouble: Callable[[int, tuple[int, ...]], Any] = lambda number, prompt: None
    """(request number, prompt) -> the fault: None, (status, body, headers), or `cut`."""
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    gone: bool = False
    """Whether it closes every connection to /v1/models without an answer."""
    url: str = ""
    pause: float = 0.0
    """Seconds before each answer."""
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], prompt: tuple[int, ...]) -> dict[str, Any]:
        tokens = list(self.outputs[prompt])
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        choice = {"text": text, "finish_reason": "stop" if tokens[-1] == EOS else "length"}
        if body.get("return_token_ids"):
            choice["token_ids"] = tokens
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return {"choices": [choice], "usage": usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: Fake

    def do_GET(self) -> None:
        self.fake.keys.add(self.headers.get("Authorization"))
        if self.fake.gone:
            self.close_connection = True
            return
        if self.path != "/v1/models":
            return self.send(404, {"error": {"message": "Not Found"}})
        models = self.fake.models
        listed = [{"id": name, "object": "model"} for name in models or ()]
        self.send(200, {"data": listed} if models is not None else {"hello": 1})

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        with fake.lock:
            number = len(fake.prompts)
            fake.prompts.append(tuple(prompt))
            fake.bodies.append(body)
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
        try:
            time.sleep(fake.pause)
            trouble = fake.trouble(number, tuple(prompt))
            if trouble in (None, "cut"):
                self.send(200, fake.answer(body, tuple(prompt)), cut=trouble == "cut")
            else:
                self.send(*trouble)
        finally:
            with fake.lock:
                fake.at_once -= 1

    def send(
        self, status: int, body: Any, headers: Mapping[str, str] = AT_ONCE, cut: bool = False
    ) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        kind = "text/html" if isinstance(body, str) else "application/json"
        for name, value in {**headers, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Runs the server on a free port until the block ends."""
    handler = type("Own", (Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # dropped connections are no errors
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
