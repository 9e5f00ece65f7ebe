"""Options that all recipes have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value settings")]
RecipeFile = Annotated[Path, typer.Option("--config", help="YAML settings")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print sizes, steps, disk and memory; write nothing")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks")]
