"""Finished runs in checkpoints/ and what they know: target, held-out rows, draft length.

A run is a folder with run.yaml (the recipe's settings) and final/ (the drafter). Imports no torch.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from drafttrain.config.base import ConfigError
from drafttrain.config.kinds import MAX_GRAM, named_kind, own_kind
from drafttrain.config.policy import Policy
from drafttrain.config.reading import load_settings
from drafttrain.config.recipes import DistillingRecipe, HeadRecipe
from drafttrain.config.stops import STOPS
from drafttrain.config.verifiers import RULES

CHECKPOINTS = Path("checkpoints")
LAYOUT = {
    "input_column",
    "template",
    "reference_column",
    "source_language",
    "target_language",
    "prefix",
    "suffix",
    "chat",
}
"""Settings of prompts that say how they are read, not which they are."""


@dataclass(frozen=True)
class Run:
    """A finished training run of a drafter that is made for one target."""

    folder: Path
    recipe: DistillingRecipe

    @property
    def drafter(self) -> Path:
        return self.folder / "final"


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


def fill_from_run(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """Target, drafter and draft length of `eval` and `generate`, where a run knows them.

    No drafter and no target: the newest run. No drafter, but a target: the newest run for it, or
    max-gram, which needs no training. A drafter that lies in a run: that run; another one:
    the target that its config.json names, and the policy.json of an export. What the user gave
    always wins; a target with a path of its own takes nothing from a run. Raises ConfigError where
    nothing says which drafter or target.
    """
    values = deepcopy(values)
    decode, target = _group(values, "decode"), _group(values, "target")
    drafter = decode.get("drafter")
    if drafter is None and target.get("path") is not None:
        drafter = decode["drafter"] = _drafter_for(str(target["path"]), checkpoints)
    trained = named_kind(drafter) is None
    if drafter is None or (not trained and target.get("path") is None):
        run = newest_run(checkpoints)
    else:
        run = run_of(str(drafter)) if trained else None
    if run is not None and trained:
        decode["drafter"] = str(run.drafter)
        stop = _group(decode, "stop")
        if stop.get("kind", "fixed") == "fixed" and not decode.get("cascade"):
            stop.setdefault("k", run.recipe.drafter.k)
    if run is None and trained:
        _fill_from_policy(decode, Path(str(drafter)) / "policy.json")
    if run is not None and target.get("path") is None:
        values["target"] = run.recipe.target.model_dump(mode="json") | target
    elif target.get("path") is None:
        values["target"] = _trained_for(str(drafter)) | target
    if values["target"].get("path") is None:
        raise ConfigError(
            f"drafter {drafter!r} does not say here which target it is for; add --target MODEL"
        )
    return values


def _drafter_for(target: str, checkpoints: Path) -> str:
    """The newest drafter trained for this target, else max-gram; says which."""
    runs = map(read_run, finished_runs(checkpoints))
    newest = next((run for run in runs if run.recipe.target.path == target), None)
    found = MAX_GRAM.name if newest is None else str(newest.drafter)
    why = "none is trained for this target" if newest is None else "the newest for this target"
    print(f"no drafter is given: using {found} ({why})", file=sys.stderr)
    return found


def _fill_from_policy(decode: dict[str, Any], file: Path) -> None:
    """Stop and verifier of an export's policy.json, where the user gave none of their settings.

    A policy for greedy decoding only is left out where the user samples.
    """
    if not file.is_file():
        return
    try:
        policy = Policy.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{file} is no policy of an export ({' '.join(str(error).split())}); export the "
            "drafter anew"
        ) from None
    greedy = float((decode.get("sampling") or {}).get("temperature") or 0.0) == 0.0
    stop, verifier = _group(decode, "stop"), _group(decode, "verifier")
    chains = (decode.get("tree") or {}).get("kind", "none") == "none"  # of which alone it speaks
    if (
        chains
        and not decode.get("cascade")
        and not stop
        and (greedy or not STOPS[policy.stop].greedy_only)
    ):
        stop |= policy.stop_config().model_dump(exclude_unset=True)
    rule = RULES.get(policy.verifier.kind)
    if not verifier and greedy and rule is not None and not rule.lossless:
        verifier |= policy.verifier.model_dump()


def fill_data(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """Inputs of `eval`, where none are given: the held-out rows of the run.

    To be used after `fill_from_run`. Raises ConfigError where no run says which rows.
    """
    values = deepcopy(values)
    data, drafter = _group(values, "data"), str(values["decode"]["drafter"])
    if data.get("path") is not None:
        return values
    run = run_of(drafter) if named_kind(drafter) is None else newest_run(checkpoints)
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
        raise ConfigError(
            f"{name} = {values[name]!r} is a value, not a group of settings; name one in it, as "
            f"{name}.path={values[name]}"
        )
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
    return (run / "run.yaml").is_file() and _recipe_of(run / "final") is not None


def _recipe_of(drafter: Path) -> str | None:
    """What names the settings of the recipe that trained a drafter; None for another's."""
    kind = own_kind(_model_type(drafter))
    return None if kind is None else kind.recipe


@dataclass(frozen=True)
class HeadRun:
    """A finished run of acceptance heads: final/ holds a folder a head."""

    folder: Path
    recipe: HeadRecipe


def newest_head_run(folder: Path = CHECKPOINTS) -> HeadRun:
    """The run whose heads were finished last. Raises ConfigError where there is none."""
    finished = [file.parent for file in folder.rglob("run.yaml") if head_folders(file.parent)]
    if not finished:
        raise ConfigError(
            f"no finished run of heads in {str(folder)!r}; train one with `accelerate launch "
            "recipes/train_acceptance_head.py`, or give --heads"
        )
    newest = max(finished, key=lambda run: head_folders(run)[0].stat().st_mtime)
    return HeadRun(newest, load_settings(HeadRecipe, newest / "run.yaml"))


def head_run_of(heads: Path) -> HeadRun | None:
    """The run that heads (RUN, RUN/final, or a head's folder in it) belong to, if any."""
    for run in (heads, heads.parent, heads.parent.parent):
        if (run / "run.yaml").is_file() and head_folders(run):
            return HeadRun(run, load_settings(HeadRecipe, run / "run.yaml"))
    return None


def head_folders(place: Path) -> list[Path]:
    """Folders of acceptance heads: the place itself, or those in it or in its final/."""
    holders = [[place], sorted(place.glob("*")), sorted((place / "final").glob("*"))]
    for folders in holders:
        found = [folder for folder in folders if _model_type(folder) == "acceptance-head"]
        if found:
            return found
    return []


def fill_from_heads(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """Target, drafter, prompts and sampling of `tune`, where the run of the heads knows them.

    What the user gave wins. Prompts given without columns, prefix or suffix are read as the run's
    own. Raises ConfigError where nothing says what is needed.
    """
    values = deepcopy(values)
    heads = values.get("heads")
    run = newest_head_run(checkpoints) if heads is None else head_run_of(Path(heads))
    if run is not None:
        values.setdefault("heads", str(run.folder))
        values.setdefault("drafter", run.recipe.drafter)
        if _group(values, "target").get("path") is None:
            target = run.recipe.target.model_dump(mode="json")
            values["target"] = target | _group(values, "target")
        _fill_prompts(values, run.recipe)
    folders = head_folders(Path(values["heads"]))
    if not folders:
        raise ConfigError(
            f"heads = {str(values['heads'])!r} holds no acceptance head; give a head's folder, or "
            "the run of recipes/train_acceptance_head.py"
        )
    trained = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))
    known = dict(trained.get("sampling") or {})
    if run is not None:
        limit = (run.recipe.distill.get("sampling") or {}).get("max_new_tokens")
        known |= {} if limit is None else {"max_new_tokens": limit}
    values["sampling"] = known | _group(values, "sampling")
    for name in ("target.path", "drafter", "data.path"):
        group, _, key = name.partition(".")
        if (_group(values, group).get(key) if key else values.get(group)) is None:
            raise ConfigError(
                f"heads = {str(values['heads'])!r} lie in no run that says which {group} to use; "
                f"give {name}="
            )
    return values


def _fill_prompts(values: dict[str, Any], recipe: HeadRecipe) -> None:
    known = recipe.held_out or recipe.data
    layout = known.model_dump(mode="json", include=LAYOUT)
    for name in ("data", "report_data"):
        given = _group(values, name)
        if given.get("path") is not None:
            values[name] = layout | given
        elif name == "data" and recipe.held_out is not None:
            values[name] = known.model_dump(mode="json") | given
        elif not given:
            del values[name]


def _model_type(folder: Path) -> str | None:
    """What the config.json in a folder says, if there is one."""
    config = folder / "config.json"
    if not config.is_file():
        return None
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except ValueError:
        return None
