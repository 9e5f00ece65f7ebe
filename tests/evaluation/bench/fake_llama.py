"""Answers as llama-server does, in a thread of a test or as a program of its own.

Only the standard library: as a program it must start at once.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MADE, DRAFTED, ACCEPTED = 8, 6, 4
"""Tokens of every answer; tokens drafted for it with a drafter; those accepted."""


class FakeLlama:
    """What it has been asked, and how it answers."""

    def __init__(self, drafts: bool = False, owner: str = "llamacpp") -> None:
        self.drafts, self.owner = drafts, owner
        self.trouble: Callable[[int], Any] = lambda number: None
        """From the number of a question: None, a status, the text of an answer, or seconds."""
        self.prompts: list[tuple[int, ...]] = []
        self.order: list[str] = []
        """Shared by several: who was asked."""
        self.at_once = self.most_at_once = self.drafted = self.accepted = 0
        self.lock = threading.Lock()
        self.url = ""

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """With a drafter tokens come a few at a time."""
        tokens = [(sum(body["prompt"]) + place) % 36 + 4 for place in range(MADE)]
        step = MADE // (MADE - ACCEPTED) if self.drafts else 1
        if self.owner == "vllm":
            for start in range(0, MADE, step):
                part = tokens[start : start + step]
                yield {"choices": [{"text": "x", "token_ids": part, "finish_reason": None}]}
            yield {"choices": [], "usage": {"completion_tokens": MADE}}
            return
        for start in range(0, MADE, step):
            yield {"content": "x", "tokens": tokens[start : start + step], "stop": False}
        timings = {"draft_n": DRAFTED, "draft_n_accepted": ACCEPTED} if self.drafts else {}
        last = {"content": "", "tokens": [], "stop": True, "stop_type": "limit"}
        yield last | {"tokens_predicted": MADE, "timings": timings}

    def metrics(self) -> str:
        lines = ["# HELP", 'vllm:spec_decode_num_drafts_total{engine="0"} 9.0']
        for name, value in (("draft_tokens", self.drafted), ("accepted_tokens", self.accepted)):
            lines += [f'vllm:spec_decode_num_{name}_total{{engine="{n}"}} {value}' for n in (0, 1)]
        return "\n".join([*lines, "process_start_time_seconds 1.7e9", ""])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeLlama

    def do_GET(self) -> None:
        pages = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": "tiny", "owned_by": self.fake.owner}]},
        }
        if self.path == "/metrics":
            return self.send(200, self.fake.metrics())
        self.send(200 if self.path in pages else 404, json.dumps(pages.get(self.path, {})))

    def do_POST(self) -> None:
        fake = self.fake
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] is True
        with fake.lock:
            number = len(fake.prompts)
            fake.prompts.append(tuple(body["prompt"]))
            fake.order.append("with" if fake.drafts else "without")
            fake.at_once += 1
            fake.most_at_once = max(fake.most_at_once, fake.at_once)
            fake.drafted += DRAFTED
            fake.accepted += ACCEPTED
        try:
            trouble = fake.trouble(number)
            if isinstance(trouble, float):
                time.sleep(trouble)
            if isinstance(trouble, int):
                return self.send(trouble, json.dumps({"error": {"message": "out of memory"}}))
            if isinstance(trouble, str):
                return self.send(200, trouble)
            events = [f"data: {json.dumps(event)}\n\n" for event in fake.events(body)]
            self.send(200, "".join([*events, "data: [DONE]\n\n"]))
        finally:
            with fake.lock:
                fake.at_once -= 1

    def send(self, status: int, text: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())
        except OSError:  # whoever asked has gone
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def open_server(fake: FakeLlama, port: int = 0) -> ThreadingHTTPServer:
    handler = type("Own", (Handler,), {"fake": fake})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # lines that are dropped
    return server


@contextmanager
def serving(*fakes: FakeLlama) -> Iterator[tuple[FakeLlama, ...]]:
    """The servers on free ports, until the block ends."""
    servers = [open_server(fake) for fake in fakes]
    for fake, server in zip(fakes, servers, strict=True):
        fake.url, fake.order = f"http://127.0.0.1:{server.server_address[1]}", fakes[0].order
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield fakes
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def main() -> None:
    """As llama-server: refuses drafters of other vocabularies, says who it is beside its model."""
    parser = argparse.ArgumentParser()
    for option in ("-m", "-md", "--host", "--port", "-np", "-c", "--spec-type"):
        parser.add_argument(option)
    for option in ("--spec-draft-n-max", "--spec-draft-p-min", "--slow"):
        parser.add_argument(option)
    given = parser.parse_args()
    name = "with" if given.md else "without"
    Path(given.m).with_name(f"{name}.json").write_text(
        json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]})
    )
    print("loading model", flush=True)
    if given.slow:
        time.sleep(60)
    if given.md and Path(given.md).read_bytes() != b"GGUF":
        print("E common: the target and draft vocabs are not compatible\nexiting", flush=True)
        raise SystemExit(1)
    open_server(FakeLlama(drafts=given.md is not None), int(given.port)).serve_forever()


if __name__ == "__main__":
    main()
