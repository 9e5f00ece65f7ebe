"""What `eval`, `generate` and `tune` take from runs and exports where the user left it out.

Each function takes what the user wrote, as nested mappings, and gives it back with more in it; what
was given always wins. Imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.kinds import MAX_GRAM, named_kind
from drafttrain.config.policy import Policy
from drafttrain.config.recipes import HeadRecipe
from drafttrain.config.runs import (
    CHECKPOINTS,
    HeadRun,
    Run,
    finished_runs,
    head_folders,
    head_run_of,
    newest_head_run,
    newest_run,
    read_run,
    run_of,
)
from drafttrain.config.stops import STOPS
from drafttrain.config.verifiers import RULES, VerifierRule

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


def fill_eval(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """All that `eval` needs: target, drafter, draft length, inputs, and where the report goes.

    Runs among the drafters of other methods are what they trained. Raises ConfigError where nothing
    says which drafter, target or inputs.
    """
    values = fill_data(fill_from_run(values, checkpoints), checkpoints)
    others = _group(values, "others")
    for name in others:
        other = _group(others, name)
        run = run_of(str(other.get("drafter")))
        if run is not None:
            other["drafter"] = str(run.drafter)
    if values.get("report") is None:
        run = run_of(str(values["decode"]["drafter"]))
        values["report"] = str((Path() if run is None else run.folder) / "report.json")
    return values


def fill_tune(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """All that `tune` needs: what the run of the heads knows, and where the report goes.

    A drafter without heads is tuned alone, with what its own run knows. Raises ConfigError where
    nothing says what is needed.
    """
    if values.get("heads") is None and values.get("drafter") is not None:
        return _fill_without_heads(values, checkpoints)
    values = fill_from_heads(values, checkpoints)
    if values.get("report") is None:
        heads = Path(str(values["heads"]))
        run = head_run_of(heads)
        values["report"] = str((heads if run is None else run.folder) / "tune.json")
    return values


def _fill_without_heads(values: dict[str, Any], checkpoints: Path) -> dict[str, Any]:
    """A drafter alone: target and prompts as its run knows them."""
    values = deepcopy(values)
    asked = {name: values[name] for name in ("target", "data") if values.get(name) is not None}
    decode = {"drafter": values["drafter"]}
    known = fill_data(fill_from_run({**asked, "decode": decode}, checkpoints), checkpoints)
    values |= {"target": known["target"], "data": known["data"]}
    values["drafter"] = known["decode"]["drafter"]
    _group(values, "sampling")
    if values.get("report") is None:
        run = run_of(str(values["drafter"]))
        values["report"] = str((Path() if run is None else run.folder) / "tune.json")
    return values


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
    path = target.get("path")
    if decode.get("drafter") is None and path is not None:
        decode["drafter"] = _drafter_for(str(path), checkpoints)
    drafter = decode.get("drafter")
    trained = named_kind(drafter) is None
    if drafter is None or (not trained and path is None):
        run = newest_run(checkpoints)
    else:
        run = run_of(str(drafter)) if trained else None
    if values.get("policy") is not None or trained:
        _fill_from_drafter(decode, run, _asked(values))
    if path is None:
        known = _trained_for(str(drafter)) if run is None else _recorded(run.recipe.target)
        values["target"] = known | target
    if values["target"].get("path") is None:
        raise ConfigError(
            f"drafter {drafter!r} does not say here which target it is for; add --target MODEL"
        )
    return values


def fill_distill(values: dict[str, Any]) -> dict[str, Any]:
    """The drafter of `distill`, where it is a run or an export: its folder, and when it stops.

    A rule that its policy.json may ask for is left out: what is distilled is the target's own.
    """
    drafter = values.get("drafter")
    if drafter is None or named_kind(drafter) is not None:
        return values
    values = deepcopy(values)
    decode = {"drafter": drafter, "stop": _group(values, "stop")}
    if values.get("method") == "sample":
        decode["sampling"] = values.get("sampling")
    _fill_from_drafter(decode, run_of(str(drafter)), replace(_asked(values), methods=False))
    return values | {"drafter": decode["drafter"], "stop": decode["stop"]}


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
    values["data"] = _recorded(run.recipe.held_out) | data
    return values


def fill_from_heads(values: dict[str, Any], checkpoints: Path = CHECKPOINTS) -> dict[str, Any]:
    """Target, drafter, prompts and sampling of `tune`, where the run of the heads knows them.

    What the user gave wins. Prompts given without columns, prefix or suffix are read as the run's
    own. Raises ConfigError where nothing says what is needed.
    """
    values = deepcopy(values)
    heads = values.get("heads")
    run = newest_head_run(checkpoints) if heads is None else head_run_of(Path(heads))
    if run is not None:
        for name, known in (("heads", str(run.folder)), ("drafter", run.recipe.drafter)):
            if values.get(name) is None:
                values[name] = known
        if _group(values, "target").get("path") is None:
            values["target"] = _recorded(run.recipe.target) | values["target"]
        _fill_prompts(values, run.recipe)
    own = run_of(str(values.get("drafter")))
    if own is not None:
        values["drafter"] = str(own.drafter)
    folders = head_folders(Path(values["heads"]))
    if not folders:
        raise ConfigError(
            f"heads = {str(values['heads'])!r} holds no acceptance head; give a head's folder, or "
            "the run of recipes/train_acceptance_head.py"
        )
    values["sampling"] = _labels_sampling(folders[0], run) | _group(values, "sampling")
    for name in ("target.path", "drafter", "data.path"):
        group, _, key = name.partition(".")
        if (_group(values, group).get(key) if key else values.get(group)) is None:
            raise ConfigError(
                f"heads = {str(values['heads'])!r} lie in no run that says which {group} to use; "
                f"give {name}="
            )
    return values


@dataclass(frozen=True)
class _Asked:
    """What of a policy.json counts."""

    batch_size: int
    file: Path | None = None
    """The one given; None: that of the drafter."""
    methods: bool = True
    """Whether the tree or cascade in it may take the place of its chains."""


def _asked(values: Mapping[str, Any]) -> _Asked:
    """As the values of a command say: sweeps and teacher-forced estimates are of chains, where no
    tree is asked for.

    Raises ConfigError for a file that is given but not there.
    """
    file = values.get("policy")
    if file is not None and not Path(file).is_file():
        raise ConfigError(f"policy = {str(file)!r}: no such file; `drafttrain tune` writes one")
    given = None if file is None else Path(file)
    chains = values.get("sweep") or values.get("mode") == "teacher-forced"
    return _Asked(_batch_size(values), given, not chains)


def _fill_from_drafter(decode: dict[str, Any], run: Run | None, asked: _Asked) -> None:
    """What the run of a trained drafter knows, and the policy.json that is given or lies beside a
    drafter."""
    folder = Path(str(decode["drafter"])) if run is None else run.drafter
    _fill_from_policy(decode, asked.file or folder / "policy.json", asked)
    if run is not None:
        _take_drafter(decode, run)


def _take_drafter(decode: dict[str, Any], run: Run) -> None:
    """The run's drafter, and for a fixed length the one it was trained with."""
    decode["drafter"] = str(run.drafter)
    stop = _group(decode, "stop")
    if not decode.get("cascade") and stop.get("kind", "fixed") == "fixed":
        stop.setdefault("k", run.recipe.drafter.k)


def _fill_prompts(values: dict[str, Any], recipe: HeadRecipe) -> None:
    known = recipe.held_out or recipe.data
    layout = known.model_dump(mode="json", include=LAYOUT)
    for name in ("data", "report_data"):
        given = _group(values, name)
        if given.get("path") is not None:
            values[name] = layout | given
        elif name == "data" and recipe.held_out is not None:
            values[name] = _recorded(known) | given
        elif not given:
            del values[name]


def _labels_sampling(head: Path, run: HeadRun | None) -> dict[str, Any]:
    """How a head's labels were decoded, as it and its run recorded it."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    known = dict(config.get("sampling") or {})
    if run is not None:
        limit = (run.recipe.distill.get("sampling") or {}).get("max_new_tokens")
        known |= {} if limit is None else {"max_new_tokens": limit}
    return known


def _drafter_for(target: str, checkpoints: Path) -> str:
    """The newest drafter trained for this target, else max-gram; says which."""
    runs = map(read_run, finished_runs(checkpoints))
    newest = next((run for run in runs if run.recipe.target.path == target), None)
    found = MAX_GRAM.name if newest is None else str(newest.drafter)
    why = "none is trained for this target" if newest is None else "the newest for this target"
    print(f"no drafter is given: using {found} ({why})", file=sys.stderr)
    return found


def _fill_from_policy(decode: dict[str, Any], file: Path, asked: _Asked) -> None:
    """What a policy.json chose, where the user gave none of its settings: its tree or cascade, if
    it has one, else stop and verifier.

    A policy or rule for greedy decoding only is left out where the user samples; other rules count
    there, for chains.
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
    policy = policy.at(asked.batch_size)
    greedy = float((decode.get("sampling") or {}).get("temperature") or 0.0) == 0.0
    stop, verifier = _group(decode, "stop"), _group(decode, "verifier")
    chains = (decode.get("tree") or {}).get("kind", "none") == "none"  # of which alone it speaks
    free = chains and not decode.get("cascade") and not stop
    method = policy.method_for(greedy) if free and asked.methods and not verifier else None
    if method is not None:
        values = method.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        decode |= {name: value for name, value in values.items() if not decode.get(name)}
        return
    if free and (greedy or not STOPS[policy.stop].greedy_only):
        stop |= policy.stop_config().model_dump(exclude_unset=True)
    rule = RULES.get(policy.verifier.kind)
    if not verifier and rule is not None and _counts(rule, greedy, chains):
        verifier |= policy.verifier.model_dump(exclude_unset=True)


def _batch_size(values: Mapping[str, Any]) -> int:
    """Sequences that a command decodes at once, where it says one number; else 1."""
    given = values.get("batch_size", values.get("batch_rows"))
    return int(given) if isinstance(given, int) or str(given).isdigit() else 1


def _counts(rule: VerifierRule, greedy: bool, chains: bool) -> bool:
    """Whether a rule of policy.json makes a difference here that was meant: a lossy one wherever it
    is right, a lossless one where chains are sampled."""
    right = (greedy or not rule.greedy_only) and (chains or rule.takes_trees)
    return right and (not rule.lossless or (chains and not greedy))


def _recorded(settings: Config) -> dict[str, Any]:
    """Settings of a run, as a user would write them."""
    return settings.model_dump(mode="json")


def _trained_for(drafter: str) -> dict[str, Any]:
    """Path and revision of the target, as a local drafter's config.json has them."""
    config = Path(drafter) / "config.json"
    try:
        target = json.loads(config.read_text(encoding="utf-8")).get("target")
    except (OSError, ValueError):
        return {}
    return {key: target[key] for key in ("path", "revision") if target and target.get(key)}


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
