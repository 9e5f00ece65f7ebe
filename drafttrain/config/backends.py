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


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(
            "transformers",
            "drafttrain.data.distill.generation:open_generate",
            ("greedy", "beam", "sample"),
        ),
        Backend(  # the loop that `generate` and `eval` decode with, with a drafter if one is given
            "engine",
            "drafttrain.build.distilling:open_engine",
            ("greedy", "sample"),
            checks="drafttrain.build.distilling:check_engine",
            takes_drafter=True,
        ),
        Backend(  # a decoder-only target that OpenAI-compatible servers run
            "server",
            "drafttrain.data.distill.server:open_server",
            ("greedy", "sample"),
            checks="drafttrain.data.distill.server:check_server",
            reads_weights=False,
        ),
    )
}
