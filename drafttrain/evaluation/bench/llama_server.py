"""llama-server as a process of our own: started on loopback, waited for, ended."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Self

from drafttrain.config.base import ConfigError
from drafttrain.config.serving import LlamaServerConfig
from drafttrain.data.servers.transport import Connection, Failure, read_address

HOST = "127.0.0.1"
TROUBLE = re.compile(r"\b(error|failed|invalid|unable|not compatible|must match)\b", re.IGNORECASE)
"""What the line of a log says that tells why a server ended."""
SHOWN = 200
"""Characters of such a line in a message."""
PATIENCE = 5.0
"""Seconds that it has to end by itself."""


def check_llama_server(config: LlamaServerConfig) -> None:
    """Refuse what can be known to be wrong before anything starts. Raises ConfigError."""
    files = {"program": config.program, "model": config.model, "draft_model": config.draft_model}
    for name, file in files.items():
        if file is None:
            raise ConfigError(
                f"llama.{name} is missing; give --llama-server PATH, --model and --draft-model, "
                "two GGUF files"
            )
        if not file.is_file():
            raise ConfigError(f"llama.{name} = {str(file)!r}: no such file")
    if config.program is not None and not os.access(config.program, os.X_OK):
        raise ConfigError(
            f"llama.program = {str(config.program)!r} is no program that can be run; give "
            "llama.cpp's llama-server"
        )


class LlamaServer:
    """A llama-server without the drafter, or with it, for a `with` statement."""

    def __init__(self, config: LlamaServerConfig, slots: int, drafts: bool) -> None:
        self.config, self.slots, self.drafts = config, slots, drafts
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()

    def command(self, port: int) -> list[str]:
        """What is run. The context is that of all slots together."""
        config = self.config
        words = [str(config.program and config.program.absolute()), "-m", str(config.model)]
        words += ["--host", HOST, "--port", str(port)]
        words += ["-np", str(self.slots), "-c", str(self.slots * config.context)]
        if self.drafts:
            words += ["-md", str(config.draft_model), "--spec-type", "draft-simple"]
            words += ["--spec-draft-n-max", str(config.n_max)]
            words += ["--spec-draft-p-min", f"{config.p_min:g}", *config.draft_arguments]
        return [*words, *config.arguments]

    def __enter__(self) -> Self:
        """Started, and ready to answer. Raises ConfigError with the last words of one that ended,
        or is not ready in time."""
        port = _free_port()
        try:
            self._process = subprocess.Popen(
                self.command(port),
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
            )
            self.url = f"http://{HOST}:{port}"
            self._wait()
        except OSError as error:
            self._end()
            raise ConfigError(f"llama.program could not be run ({error})") from None
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _wait(self) -> None:
        assert self._process is not None
        ends = time.monotonic() + self.config.start_seconds
        connection = Connection(read_address(self.url), 1.0)
        while time.monotonic() < ends:
            if self._process.poll() is not None:
                raise ConfigError(f"{self._name()} ended at its start: {self._last_words()}")
            try:
                connection.ask("/health")
                return
            except Failure:  # loading
                time.sleep(0.05)
            finally:
                connection.close()
        raise ConfigError(
            f"{self._name()} was not ready within llama.start_seconds = "
            f"{self.config.start_seconds:g}; give it more"
        )

    def _name(self) -> str:
        return f"llama-server {'with' if self.drafts else 'without'} the drafter"

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        telling = [line for line in lines if TROUBLE.search(line)] or lines[-1:]
        assert self._process is not None
        return telling[0][:SHOWN] if telling else f"exit code {self._process.returncode}"

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._said.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
