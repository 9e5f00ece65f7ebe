"""From what a user wrote, a YAML file, `key=value` and flags, to settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.wrong_settings import explain

Settings = TypeVar("Settings", bound=Config)


def load_settings(
    kind: type[Settings],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Settings:
    """Settings from a YAML file, then `key=value` overrides, then command-line flags.

    Later ones win. Keys are dotted paths (`train.learning_rate`). fill adds what the user left
    out, once what was given is known to be right. Raises ConfigError naming the key, the value and
    the nearest known name.
    """
    values = merge_values(file, overrides, flags)
    if fill is not None:
        check_settings(kind, values)
        values = fill(values)
    return validate_settings(kind, values)


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
        raise ConfigError(explain(kind, error, within)) from None


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
            raise ConfigError(explain(kind, error)) from None


def dump_settings(settings: Config) -> str:
    """The settings as YAML, every field written out."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def first_problem(error: ValidationError) -> str:
    """Where a file departs from what it should hold, and how: the first place, in one line."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    told = first["type"] in ("missing", "json_invalid") or isinstance(first["input"], dict)
    given = "" if told else f" = {first['input']!r}"
    return f"{where}{given}: {first['msg']}" if where else first["msg"]


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
