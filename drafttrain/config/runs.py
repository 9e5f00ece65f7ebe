"""Finished runs in checkpoints/, which provide defaults for settings of commands.

A run is a folder with run.yaml (the recipe's settings) and final/ (the trained drafter or
acceptance heads). A `fill_` function takes the given settings as nested mappings and returns them
with defaults added; given settings are never changed.
"""

import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import RECORDED, STDIN
from drafttrain.config.kinds import MAX_GRAM, NONE, named_kind, own_kind
from drafttrain.config.methods import RULES, STOPS, TREES
from drafttrain.config.policy import POLICY, Policy, read_policy
from drafttrain.config.reading import merge_values, validate_settings
from drafttrain.config.recipes import CausalDrafterRecipe, DistillingRecipe, HeadRecipe
from drafttrain.config.sweep import check_sweep

CHECKPOINTS = Path("checkpoints")
HEAD = "acceptance-head"
"""The model_type of acceptance heads."""


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: final/ is a drafter for one target, or has a folder per acceptance head."""

    folder: Path
    recipe: DistillingRecipe

    @property
    def drafter(self) -> Path:
        return self.folder / "final"

    def is_for(self, target: str) -> bool:
        """Whether it is for this target; `./MODEL/` is the folder MODEL."""
        return Path(self.recipe.target.path) == Path(target)


def newest_run(folder: Path = CHECKPOINTS, of_heads: bool = False) -> TrainedRun:
    """Returns the newest run of a drafter or of heads. Raises ConfigError if there is none."""
    if run := next(iter(finished_runs(folder, of_heads)), None):
        return read_run(run)
    recipe = "quickstart-heads" if of_heads else "recipes/seq2seq.yaml` or `recipes/causal.yaml"
    options = "--heads" if of_heads else "--target and --drafter"
    raise ConfigError(
        f"no finished run in {str(folder)!r}; `drafttrain train {recipe}`, or give {options}"
    )


def finished_runs(folder: Path, of_heads: bool = False) -> list[Path]:
    """Returns the folders of the finished runs of drafters, or of heads, newest first."""
    recipes = {file.parent: _recipe_of(file.parent) for file in folder.rglob("run.yaml")}
    runs = [run for run, kind in recipes.items() if kind and (kind is HeadRecipe) is of_heads]

    def ended(run: Path) -> float:
        trained = head_folders(run)[0] if of_heads else run / "final"
        return (trained / "config.json").stat().st_mtime

    return sorted(runs, key=ended, reverse=True)


def run_of(drafter: str) -> TrainedRun | None:
    """Returns the run of a drafter folder (RUN/final or RUN), or None."""
    folder = Path(expanduser(drafter))
    run = folder.parent if folder.name == "final" else folder
    return None if _recipe_of(run) in (None, HeadRecipe) else read_run(run)


def head_run_of(heads: Path) -> TrainedRun | None:
    """Returns the run of a folder of heads (RUN, RUN/final or a head's folder in it), or None."""
    folders = (heads, heads.parent, heads.parent.parent)
    return next((read_run(run) for run in folders if _recipe_of(run) is HeadRecipe), None)


def head_folders(path: Path) -> list[Path]:
    """Returns the folders of acceptance heads: the path, or those in its final/, else in it."""
    parent = path / "final" if (path / "final").is_dir() else path
    for folders in ([path], sorted(parent.glob("*"))):
        heads = [folder for folder in folders if read_config(folder).get("model_type") == HEAD]
        if heads:
            return heads
    return []


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the config.json in a folder; empty if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def recorded_target(folder: Path) -> dict[str, Any]:
    """Returns the target's path and languages in the config.json of a drafter or head, if any."""
    target = read_config(folder).get("target") or {}
    return {name: target[name] for name in RECORDED if target.get(name)}


def read_run(folder: Path) -> TrainedRun:
    """Reads a finished run. Raises ConfigError naming all settings that this version lacks."""
    path = folder / "run.yaml"
    try:
        return TrainedRun(folder, validate_settings(_recipe_of(folder), merge_values(path)))
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error}; if another version of drafttrain wrote it, remove these lines from "
            "the file or train again"
        ) from None


def _recipe_of(run: Path) -> type[DistillingRecipe] | None:
    """Returns the settings class of the recipe of a finished run; None for other folders."""
    if not (run / "run.yaml").is_file():
        return None
    config = read_config(run / "final")
    if kind := own_kind(config):
        return kind.recipe and resolve_name(kind.recipe)
    if isinstance(config.get("target"), dict):  # else trained for no particular target
        return CausalDrafterRecipe
    return HeadRecipe if head_folders(run) else None


def fill_eval(values: dict[str, Any]) -> dict[str, Any]:
    """Fills the settings of `eval`: target, drafter, draft length, inputs and the report's file.

    Another method without a drafter gets that of `decode`; a run that it names becomes its drafter,
    with its draft length. Raises ConfigError if drafter, target or inputs are unknown.
    """
    check_sweep(values)
    values = fill_data(fill_from_run(values))
    for other in (values.get("others") or {}).values():
        if other.get("drafter") is None:
            other["drafter"] = values["decode"]["drafter"]
        if run := run_of(str(other["drafter"])):
            _draft_with(other, run)
    run = run_of(str(values["decode"]["drafter"]))
    folder = Path() if run is None else run.folder
    return values | {"report": values.get("report") or str(folder / "report.json")}


def fill_tune(values: dict[str, Any]) -> dict[str, Any]:
    """Fills the settings of `tune` from the heads' run, then the drafter's; and the report's file.

    A drafter can be tuned without heads. Raises ConfigError if a required setting is unknown.
    """
    values, heads = deepcopy(values), values.get("heads")
    if heads is None and values.get("drafter") is None:
        heads = newest_run(of_heads=True).folder
    if heads is not None:
        heads = Path(expanduser(str(heads)))
        values["heads"] = str(heads)
        _fill_from_heads(values, heads)
    _group(values, "sampling")
    given = {name: values[name] for name in ("target", "data") if values.get(name)}
    decode = {"drafter": values["drafter"]}
    known = fill_data(fill_from_run(given | {"decode": decode}, with_policy=False))
    run = run_of(known["decode"]["drafter"])
    drafter = known["decode"]["drafter"] if run is None else str(run.drafter)
    values |= {"target": known["target"], "data": known["data"], "drafter": drafter}
    run = run if heads is None else head_run_of(heads)
    folder = (heads or Path()) if run is None else run.folder
    return values | {"report": values.get("report") or str(folder / "tune.json")}


def fill_generate(values: dict[str, Any]) -> dict[str, Any]:
    """Fills the settings of `generate`: plain decoding if policy.json says that it is faster than
    all drafts, unless the user gives settings of a method."""
    values = fill_from_run(values, draft_anyway=False)
    return values | {"data": {"path": STDIN} | _group(values, "data")}


def fill_from_run(
    values: dict[str, Any], draft_anyway: bool = True, with_policy: bool = True
) -> dict[str, Any]:
    """Fills target, drafter, draft length and policy of `eval` and `generate`.

    Without drafter and target: from the newest run. With a target only: the drafter is that of the
    newest run for this target, or max-gram, which needs no training. With a drafter: from its run,
    or else the target in its config.json and the policy.json of an export. If target.path is
    given, no other target settings are taken from a run. Raises ConfigError if drafter or target
    are unknown. with_policy=False: fills drafter and target only.
    """
    values = deepcopy(values)
    decode, target = _group(values, "decode"), _group(values, "target")
    for group, name in ((decode, "drafter"), (target, "path")):
        if isinstance(group.get(name), str):
            group[name] = expanduser(group[name])
    path = target.get("path")
    if decode.get("drafter") is None and path is not None:
        decode["drafter"] = _drafter_for(str(path))
    drafter = decode.get("drafter")
    named = named_kind(drafter)
    trained = named is None
    run = run_of(str(drafter)) if trained and drafter is not None else None
    if path is None and (drafter is None or not trained):
        run = newest_run()
    if with_policy and (trained or (values.get("policy") is not None and named is not NONE)):
        given = any(decode.get(name) for name in ("stop", "tree", "cascade", "verifier"))
        chains = bool(values.get("sweep")) or values.get("mode") == "teacher-forced"
        policy = _fill_from_drafter(decode, run if trained else None, values, chains)
        slower = policy and not policy.speculate and policy.chosen_for(_is_greedy(decode))
        if slower and not given and not draft_anyway:
            print(f"{POLICY}: plain decoding is faster than all drafts", file=sys.stderr)
            decode |= {"drafter": NONE.name, "stop": {}, "verifier": {}}
    if path is None and run is not None:
        values["target"] = run.recipe.target.model_dump(mode="json") | target
    elif path is None:
        known = recorded_target(Path(str(drafter)))
        values["target"] = known | target
        moved = known and not ("/" in known["path"] or Path(known["path"]).is_dir())
        if moved:  # an export has Hub names, but only the last part of a folder's path
            recorded = f"{str(drafter)!r} was trained for target {known['path']!r}"
            print(f"{recorded}; give --target if it is in another folder", file=sys.stderr)
    if values["target"].get("path") is None:
        missing = f"drafter {drafter!r}: no such folder; give a run, or for a Hub name "
        if Path(str(drafter)).exists():
            missing = f"the target of drafter {drafter!r} is not recorded; "
        raise ConfigError(f"{missing}add --target MODEL")
    return values


def fill_data(values: dict[str, Any]) -> dict[str, Any]:
    """Fills the inputs of `eval`, after `fill_from_run`, with the held-out rows of the run.

    Raises ConfigError if there are none and no inputs are given.
    """
    data, drafter = values.get("data") or {}, str(values["decode"]["drafter"])
    if data.get("path") is not None:
        return values
    run = run_of(drafter) if named_kind(drafter) is None else newest_run()
    target = values["target"]["path"]
    if run is None or run.recipe.held_out is None or not run.is_for(target):
        raise ConfigError(f"no run for target {target!r} has held-out inputs; add --data FILE")
    return values | {"data": run.recipe.held_out.model_dump(mode="json") | data}


def _fill_from_heads(values: dict[str, Any], heads: Path) -> None:
    """Fills drafter, target, prompts and sampling from the heads and their run.

    Raises ConfigError if there are no heads, or if their drafter is unknown.
    """
    folders, run = head_folders(heads), head_run_of(heads)
    if not folders:
        raise ConfigError(f"heads = {str(heads)!r} has no acceptance head; give a head or its run")
    known = dict(read_config(folders[0]).get("sampling") or {})
    if run is not None:
        recipe = run.recipe
        values["drafter"] = values.get("drafter") or recipe.drafter
        if _group(values, "target").get("path") is None:
            values["target"] = recipe.target.model_dump(mode="json") | values["target"]
        if recipe.held_out is not None and _group(values, "data").get("path") is None:
            values["data"] = recipe.held_out.model_dump(mode="json") | values["data"]
        limit = (recipe.distill.get("sampling") or {}).get("max_new_tokens")
        known |= {} if limit is None else {"max_new_tokens": limit}
    values["sampling"] = known | _group(values, "sampling")
    if not values.get("drafter"):
        raise ConfigError(f"the drafter of heads = {str(heads)!r} is unknown; add --drafter")


def _fill_from_drafter(
    decode: dict[str, Any], run: TrainedRun | None, values: Mapping[str, Any], chains: bool
) -> Policy | None:
    """Fills decode from policy.json (for chains: without its tree or cascade), then drafter and
    draft length from the run. Returns the policy or None."""
    folder = Path(str(decode["drafter"])) if run is None else run.drafter
    file, policy = Path(expanduser(str(values.get("policy") or folder / POLICY))), None
    if values.get("policy") or file.is_file():
        size = int(float(values.get("batch_size") or 1))  # "4.0" is a count too
        policy = read_policy(file).at(size)
        _fill_from_policy(decode, policy, chains)
    if run is not None:
        _draft_with(decode, run)
    return policy


def _draft_with(decode: dict[str, Any], run: TrainedRun) -> None:
    """Sets the drafter that a run trained, and its draft length unless another stop policy is given
    or is the default (of an opt-tree or a cascade)."""
    decode["drafter"] = str(run.drafter)
    stop, tree = _group(decode, "stop"), TREES[(decode.get("tree") or {}).get("kind", "none")]
    if not decode.get("cascade") and tree.stop == stop.get("kind", "fixed") == "fixed":
        stop.setdefault("k", run.recipe.drafter.k)


def _fill_from_policy(decode: dict[str, Any], policy: Policy, chains: bool) -> None:
    """Fills decode from a policy: its tree or cascade if it has one, else stop policy and verifier.

    Keeps what the user gave. Leaves out a stop policy or verifier that is not valid for sampled
    decoding, and a lossless verifier except for sampled chains.
    """
    greedy, stop, verifier = _is_greedy(decode), _group(decode, "stop"), _group(decode, "verifier")
    tree = (decode.get("tree") or {}).get("kind", "none") != "none"
    free = not tree and not decode.get("cascade") and not stop
    method = policy.method if policy.chosen_for(greedy) else None
    if method is not None and free and not chains and not verifier:
        chosen = method.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        decode |= {name: value for name, value in chosen.items() if not decode.get(name)}
        return
    if free and (greedy or not STOPS[policy.stop].greedy_only):
        stop |= policy.stop_config().model_dump(exclude_unset=True)
    chosen = policy.verifier if tree else policy.verifier_for(greedy)
    rule = RULES.get(chosen.kind)
    if not verifier and rule is not None:
        valid = (greedy or not rule.greedy_only) and (not tree or rule.takes_trees)
        # lossless verifiers are all equal in greedy decoding
        if valid and (not rule.lossless or not (tree or greedy)):
            verifier |= chosen.model_dump(exclude_unset=True)


def _is_greedy(decode: Mapping[str, Any]) -> bool:
    return float((decode.get("sampling") or {}).get("temperature") or 0.0) == 0.0


def _drafter_for(target: str) -> str:
    """Returns the newest drafter trained for this target, else max-gram; prints the choice."""
    drafter, why = MAX_GRAM.name, "none is trained for this target"
    for folder in finished_runs(CHECKPOINTS):
        try:
            run = read_run(folder)
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        if run.is_for(target):
            drafter, why = str(run.drafter), "the newest for this target"
            break
    print(f"no drafter is given: using {drafter} ({why})", file=sys.stderr)
    return drafter


def _group(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the group of settings of a name; adds an empty one if there is none."""
    values[name] = values.get(name) or {}
    return values[name]
