"""From what a user wrote, YAML and `key=value`, to settings; what is wrong is told by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from drafttrain.config.base import Config, ConfigError

Settings = TypeVar("Settings", bound=Config)


def load_settings(
    kind: type[Settings],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from a YAML file, then `key=value` overrides, then command-line flags.

    Later ones win. Keys are dotted paths (`train.learning_rate`). Raises ConfigError naming the
    key, the value and the nearest known name.
    """
    return validate_settings(kind, merge_values(file, overrides, flags))


def merge_values(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the user wrote, as nested mappings, before defaults and types are applied."""
    values = {} if file is None else _read_yaml(file)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is no override: write key=value, as train.seed=1")
        try:
            value = _parse_value(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{override!r}: the value is not valid YAML ({_yaml_problem(error)}); put text in "
                f"quotes, as {key}='\"TEXT\"'"
            ) from None
        _assign(values, key, value, override)
    for key, value in (flags or {}).items():
        if value is not None:
            _assign(values, key, value, key)
    return values


def validate_settings(
    kind: type[Settings], values: Mapping[str, Any], within: str = ""
) -> Settings:
    """Settings of a kind from nested mappings. Raises ConfigError on the first thing wrong.

    within: the group that the user wrote them in, if any.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(kind, error, within)) from None


def settings_of_group(
    kind: type[Settings], group: str, given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Settings:
    """Settings of a command, of which a recipe fixes some and a group of it gives others.

    Raises ConfigError for one that is in both, and on the first thing wrong.
    """
    if clash := sorted(given.keys() & fixed.keys()):
        raise ConfigError(f"{group}.{clash[0]}: give it as {clash[0]}= at the top level")
    return validate_settings(kind, {**fixed, **given}, within=group)


def check_settings(kind: type[Config], values: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is wrong, but not for what is missing: a run may fill it in."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        if any(one["type"] != "missing" for one in error.errors()):
            raise ConfigError(_explain(kind, error)) from None


def dump_settings(settings: Config) -> str:
    """The settings as YAML, every field written out."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"no settings file {str(file)!r}; give an existing YAML file")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{file} is not valid YAML ({_yaml_problem(error)}); mend it there"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} holds a {type(values).__name__}; write a mapping of keys, as `out: FOLDER`"
        )
    return values


def _yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong and where, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())


def _parse_value(text: str) -> Any:
    value = yaml.safe_load(text) if text else None
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        return text  # data.prefix="Question: " is meant as text
    if isinstance(value, str):  # YAML 1.1 reads 3e-4 as a string
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(values: dict[str, Any], key: str, value: Any, shown: str) -> None:
    *parents, last = key.split(".")
    here = values
    for depth, parent in enumerate(parents, start=1):
        if here.get(parent) is None:
            here[parent] = {}
        below = here[parent]
        if not isinstance(below, dict):
            group = ".".join(parents[:depth])
            raise ConfigError(
                f"{shown!r}: {group} = {below!r} is a value, not a group of settings; leave one of "
                "the two out"
            )
        here = below
    here[last] = value


def first_problem(error: ValidationError) -> str:
    """Where a file departs from what it should hold, and how: the first place, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    told = first["type"] in ("missing", "json_invalid") or isinstance(first["input"], dict)
    given = "" if told else f" = {first['input']!r}"
    return f"{where}{given}: {first['msg']}" if where else first["msg"]


def _explain(kind: type[Config], error: ValidationError, within: str = "") -> str:
    errors = error.errors()
    # A misspelt key leaves another one missing; the misspelling is what the user must mend.
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(errors, key=lambda one: order.get(one["type"], 1))
    prefix = f"{within}." if within else ""
    location = prefix + ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(_names_beside(kind, first["loc"]))
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"unknown setting {location!r}; {hint}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], int):
        whole, place = location.rpartition(".")[0], first["loc"][-1] + 1
        return f"{whole} = {list(first['input'])}: value {place} is missing; give all values"
    if first["type"] == "missing":
        location = prefix + _first_needed(kind, first["loc"])
        return f"setting {location!r} is missing; give {location}=VALUE or put it in the YAML file"
    if first["type"] in ("model_type", "model_attributes_type"):
        inside = prefix + _first_needed(kind, first["loc"])
        if inside != location:
            return (
                f"{location} = {first['input']!r} is a value, not a group of settings; "
                f"give {inside}={first['input']}"
            )
        return f"{location} = {first['input']!r} is a value, not a group of settings; leave it out"
    if first["type"] == "dict_type":
        return (
            f"{location} = {first['input']!r} is a value, not a group of settings; give "
            f"{location}.NAME=VALUE"
        )
    if first["type"] == "tuple_type":
        return f"{location} = {first['input']!r} is one value; give a list, as [{first['input']}]"
    message = first["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return f"{location} = {first['input']!r}: {message}"


def _first_needed(kind: type[Config], location: Sequence[Any]) -> str:
    """A missing group of settings is named by the first setting in it that has no default."""
    here = _settings_below(kind, location)
    names = [str(part) for part in location]
    while here is not None:
        required = next((name for name, f in here.model_fields.items() if f.is_required()), None)
        if required is None:
            break
        names.append(required)
        here = _settings_below(here, [required])
    return ".".join(names)


def _names_beside(kind: type[Config], location: Sequence[Any]) -> list[str]:
    here = _settings_below(kind, location[:-1])
    return [] if here is None else list(here.model_fields)


def _settings_below(kind: type[BaseModel], location: Sequence[Any]) -> type[BaseModel] | None:
    """The settings class that a path of keys leads to; None where it leads to a plain value."""
    here = kind
    for part in location:
        if part not in here.model_fields:
            return None
        annotation = here.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not models:
            return None
        here = models[0]
    return here
