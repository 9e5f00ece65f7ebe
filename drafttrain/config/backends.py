"""What decodes in distillation, a row each: what settings, checks and plans ask.

A row names functions by dotted paths (`module:name`), which commands and recipes find with
`pkgutil.resolve_name`: the table imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DistillMethod = Literal["greedy", "beam", "sample"]


@dataclass(frozen=True)
class Backend:
    """What is known about a backend of distillation."""

    name: str
    """As settings and manifests have it."""
    opens: str
    """Function (DistillConfig, LoadedTarget) -> BatchDecoder."""
    methods: tuple[DistillMethod, ...]
    """How it can decode."""
    checks: str | None = None
    """Function (DistillConfig) -> None: refuses what only this backend knows to be wrong, before
    any weights are read."""
    takes_drafter: bool = False
    """Whether a drafter may draft for it."""
    reads_weights: bool = True
    """Whether the target decodes in this process; otherwise its tokenizer and settings suffice."""


TRANSFORMERS = Backend(
    "transformers",
    "drafttrain.data.distill.generation:open_generate",
    methods=("greedy", "beam", "sample"),
)
"""Transformers' `generate`."""
ENGINE = Backend(
    "engine",
    "drafttrain.build.distilling:open_engine",
    methods=("greedy", "sample"),
    checks="drafttrain.build.distilling:check_engine",
    takes_drafter=True,
)
"""The loop that `drafttrain generate` and `eval` decode with, with a drafter where one is given."""
SERVER = Backend(
    "server",
    "drafttrain.data.distill.server:open_server",
    methods=("greedy", "sample"),
    checks="drafttrain.data.distill.server:check_server",
    reads_weights=False,
)
"""A decoder-only target that OpenAI-compatible servers run: vLLM, SGLang, ..."""

BACKENDS = {backend.name: backend for backend in (TRANSFORMERS, ENGINE, SERVER)}
