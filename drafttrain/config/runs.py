"""Finished runs in checkpoints/, of drafters and of acceptance heads, and their settings.

A run is a folder with run.yaml (the recipe's settings) and final/ (what it trained). Imports no
torch.
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


@dataclass(frozen=True)
class Run:
    """A finished run of a drafter that is made for one target: final/ is its folder."""

    folder: Path
    recipe: DistillingRecipe

    @property
    def drafter(self) -> Path:
        return self.folder / "final"


@dataclass(frozen=True)
class HeadRun:
    """A finished run of acceptance heads: final/ holds a folder a head."""

    folder: Path
    recipe: HeadRecipe


def newest_run(folder: Path = CHECKPOINTS) -> Run:
    """The run whose drafter was finished last. Raises ConfigError where there is none."""
    finished = finished_runs(folder)
    if not finished:
        raise ConfigError(
            f"no finished run in {str(folder)!r}; train one with `accelerate launch "
            "recipes/train_spec_drafter.py`, or give --target and --drafter"
        )
    return read_run(finished[0])


def finished_runs(folder: Path) -> list[Path]:
    """Folders of the runs whose drafters are finished, the newest first."""
    found = [file.parent for file in folder.rglob("run.yaml") if _holds_drafter(file.parent)]
    return sorted(found, key=lambda run: -(run / "final" / "config.json").stat().st_mtime)


def read_run(folder: Path) -> Run:
    """The finished run in a folder, from its run.yaml."""
    recipe = _recipe_of(folder / "final")
    assert recipe is not None
    return Run(folder, load_settings(resolve_name(recipe), folder / "run.yaml"))


def run_of(drafter: str) -> Run | None:
    """The run that a drafter folder (RUN/final, or RUN itself) belongs to, if it is one."""
    folder = Path(drafter)
    for run in (folder, folder.parent):
        if _holds_drafter(run) and folder in (run, run / "final"):
            return read_run(run)
    return None


def newest_head_run(folder: Path = CHECKPOINTS) -> HeadRun:
    """The run whose heads were finished last. Raises ConfigError where there is none."""
    finished = [file.parent for file in folder.rglob("run.yaml") if head_folders(file.parent)]
    if not finished:
        raise ConfigError(
            f"no finished run of heads in {str(folder)!r}; train one with `accelerate launch "
            "recipes/train_acceptance_head.py`, or give --heads"
        )
    return read_head_run(max(finished, key=lambda run: head_folders(run)[0].stat().st_mtime))


def read_head_run(folder: Path) -> HeadRun:
    """The run of heads in a folder, from its run.yaml."""
    return HeadRun(folder, load_settings(HeadRecipe, folder / "run.yaml"))


def head_run_of(heads: Path) -> HeadRun | None:
    """The run that heads (RUN, RUN/final, or a head's folder in it) belong to, if any."""
    for run in (heads, heads.parent, heads.parent.parent):
        if (run / "run.yaml").is_file() and head_folders(run):
            return read_head_run(run)
    return None


def head_folders(place: Path) -> list[Path]:
    """Folders of acceptance heads: the place itself, or those in it or in its final/."""
    holders = [[place], sorted(place.glob("*")), sorted((place / "final").glob("*"))]
    for folders in holders:
        found = [folder for folder in folders if _model_type(folder) == HEAD]
        if found:
            return found
    return []


def _holds_drafter(run: Path) -> bool:
    return (run / "run.yaml").is_file() and _recipe_of(run / "final") is not None


def _recipe_of(drafter: Path) -> str | None:
    """What names the settings of the recipe that trained a drafter; None for another's."""
    config = _config(drafter)
    kind = own_kind(config)
    if kind is not None:
        return kind.recipe
    if not isinstance(config.get("target"), dict):  # made for no target in particular
        return None
    return TRAINED_CAUSAL


def _model_type(folder: Path) -> str | None:
    """What the config.json in a folder says, if there is one."""
    return _config(folder).get("model_type")


def _config(folder: Path) -> dict[str, Any]:
    """The config.json in a folder; nothing where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}
