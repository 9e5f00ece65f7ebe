"""Finished runs in checkpoints/, of drafters and of acceptance heads, and their settings.

A run is a folder with run.yaml (the recipe's settings) and final/ (what it trained).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import TRAINED_CAUSAL, own_kind
from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import DistillingRecipe, HeadRecipe

CHECKPOINTS = Path("checkpoints")
HEAD = "acceptance-head"
"""model_type of an acceptance head."""
HEADS = "drafttrain.config.recipes:HeadRecipe"
"""Settings of the recipe that trains heads."""


@dataclass(frozen=True)
class Run:
    """A finished run: final/ is the folder of a drafter for one target, or holds a folder for each
    acceptance head."""

    folder: Path
    recipe: DistillingRecipe | HeadRecipe

    @property
    def drafter(self) -> Path:
        return self.folder / "final"


def newest_run(folder: Path = CHECKPOINTS, of_heads: bool = False) -> Run:
    """The run finished last, of a drafter or of heads. Raises ConfigError where there is none."""
    if finished := finished_runs(folder, of_heads):
        return read_run(finished[0])
    script, give = "train_spec_drafter.py", "--target and --drafter"
    if of_heads:
        script, give = "train_acceptance_head.py", "--heads"
    raise ConfigError(
        f"no finished run in {str(folder)!r}; train one with `accelerate launch recipes/{script}`, "
        f"or give {give}"
    )


def finished_runs(folder: Path, of_heads: bool = False) -> list[Path]:
    """Folders of the runs whose drafters, or heads, are finished, the newest first."""

    def finished_at(run: Path) -> float:
        trained = [run / "final", *head_folders(run)]
        files = (folder / "config.json" for folder in trained)
        return next(file.stat().st_mtime for file in files if file.is_file())

    recipes = {file.parent: _recipe_of(file.parent) for file in folder.rglob("run.yaml")}
    right = [run for run, recipe in recipes.items() if recipe and (recipe == HEADS) is of_heads]
    return sorted(right, key=finished_at, reverse=True)


def read_run(folder: Path) -> Run:
    """The finished run in a folder, from its run.yaml."""
    recipe = _recipe_of(folder)
    assert recipe is not None
    return Run(folder, load_settings(resolve_name(recipe), folder / "run.yaml"))


def run_of(drafter: str) -> Run | None:
    """The run that a drafter folder (RUN/final, or RUN itself) belongs to, if it is one."""
    folder = Path(drafter)
    for run in (folder, folder.parent):
        if _recipe_of(run) not in (None, HEADS) and folder in (run, run / "final"):
            return read_run(run)
    return None


def head_run_of(heads: Path) -> Run | None:
    """The run that heads (RUN, RUN/final, or a head's folder in it) belong to, if any."""
    places = (heads, heads.parent, heads.parent.parent)
    return next((read_run(run) for run in places if _recipe_of(run) == HEADS), None)


def head_folders(place: Path) -> list[Path]:
    """Folders of acceptance heads: the place itself, or those in it or in its final/."""
    for folders in ([place], sorted(place.glob("*")), sorted((place / "final").glob("*"))):
        found = [folder for folder in folders if read_config(folder).get("model_type") == HEAD]
        if found:
            return found
    return []


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json in a folder; nothing where there is none."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _recipe_of(run: Path) -> str | None:
    """Names the settings of the recipe that made a finished run; None for other folders."""
    if not (run / "run.yaml").is_file():
        return None
    config = read_config(run / "final")
    kind = own_kind(config)
    if kind is not None:
        return kind.recipe
    if isinstance(config.get("target"), dict):  # otherwise made for no target in particular
        return TRAINED_CAUSAL
    return HEADS if head_folders(run) else None
