"""Finished runs in checkpoints/ and what they know: target, held-out rows, draft length.

A run is a folder with run.yaml (the recipe's settings) and final/ (the drafter). Imports no torch.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.config import ConfigError, SpecDrafterRecipe, load_settings

CHECKPOINTS = Path("checkpoints")
PLAIN = "none"
"""The drafter that proposes nothing: plain decoding."""


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    folder: Path
    recipe: SpecDrafterRecipe

    @property
    def drafter(self) -> Path:
        return self.folder / "final"


def newest_run(folder: Path = CHECKPOINTS) -> Run:
    """The run whose drafter was finished last. Raises ConfigError where there is none."""
    finished = [file.parent for file in folder.rglob("run.yaml") if _holds_drafter(file.parent)]
    if not finished:
        raise ConfigError(
            f"no finished run in {str(folder)!r}; train one with `accelerate launch "
            "recipes/train_spec_drafter.py`, or give --target and --drafter"
        )
    return read_run(max(finished, key=lambda run: (run / "final" / "config.json").stat().st_mtime))


def read_run(folder: Path) -> Run:
    """The run in a folder, from its run.yaml."""
    return Run(folder, load_settings(SpecDrafterRecipe, folder / "run.yaml"))


def run_of(drafter: str) -> Run | None:
    """The run that a drafter folder (RUN/final, or RUN itself) belongs to, if it is one."""
    folder = Path(drafter)
    for run in (folder, folder.parent):
        if _holds_drafter(run) and folder in (run, run / "final"):
            return read_run(run)
    return None


def fill_from_run(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """Target, drafter and draft length of `eval` and `generate`, where a run knows them.

    No drafter and no target: the newest run. A drafter that lies in a run: that run; another one:
    the target that its config.json names. What the user gave always wins; a target with a path of
    its own takes nothing from a run. Raises ConfigError where nothing says which drafter or target.
    """
    values = deepcopy(values)
    decode, target = _group(values, "decode"), _group(values, "target")
    drafter = decode.get("drafter")
    if drafter is None and target.get("path") is not None:
        raise ConfigError(
            "no drafter is given; add --drafter FOLDER, or --drafter none for plain decoding"
        )
    if drafter is None or (drafter == PLAIN and target.get("path") is None):
        run = newest_run(checkpoints)
    else:
        run = None if drafter == PLAIN else run_of(str(drafter))
    if run is not None and drafter != PLAIN:
        decode["drafter"] = str(run.drafter)
        stop = _group(decode, "stop")
        if stop.get("kind", "fixed") == "fixed":
            stop.setdefault("k", run.recipe.drafter.k)
    if run is not None and target.get("path") is None:
        values["target"] = run.recipe.target.model_dump(mode="json") | target
    elif target.get("path") is None:
        values["target"] = _trained_for(str(drafter)) | target
    if values["target"].get("path") is None:
        raise ConfigError(
            f"drafter {drafter!r} does not say here which target it is for; add --target MODEL"
        )
    return values


def fill_data(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """Inputs of `eval`, where none are given: the held-out rows of the run.

    To be used after `fill_from_run`. Raises ConfigError where no run says which rows.
    """
    values = deepcopy(values)
    data, drafter = _group(values, "data"), str(values["decode"]["drafter"])
    if data.get("path") is not None:
        return values
    run = newest_run(checkpoints) if drafter == PLAIN else run_of(drafter)
    if run is None or run.recipe.held_out is None:
        raise ConfigError("no inputs to measure on; add --data FILE (or a Hub name)")
    if run.recipe.target.path != values["target"]["path"]:
        raise ConfigError(
            f"no inputs are given for target {values['target']['path']!r}, and the run in "
            f"{str(run.folder)!r} is for {run.recipe.target.path!r}; add --data FILE"
        )
    values["data"] = run.recipe.held_out.model_dump(mode="json") | data
    return values


def _group(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings below a name; an empty group is put in where there is none."""
    if values.get(name) is None:
        values[name] = {}
    if not isinstance(values[name], dict):
        raise ConfigError(f"{name} = {values[name]!r} is a value, not a group of settings")
    return values[name]


def _trained_for(drafter: str) -> dict[str, Any]:
    """Path and revision of the target, as a local drafter's config.json has them."""
    config = Path(drafter) / "config.json"
    try:
        target = json.loads(config.read_text(encoding="utf-8")).get("target")
    except (OSError, ValueError):
        return {}
    return {key: target[key] for key in ("path", "revision") if target and target.get(key)}


def _holds_drafter(run: Path) -> bool:
    config = run / "final" / "config.json"
    if not config.is_file() or not (run / "run.yaml").is_file():
        return False
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type") == "spec-drafter"
    except ValueError:
        return False
