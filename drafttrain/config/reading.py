"""Reads settings from a YAML file, `key=value` overrides and flags, and checks them.

OmegaConf reads and merges; text such as `${name}` is kept literally and never resolved.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from drafttrain.config.base import Config, ConfigError, CountsFor, fields_of, plain_types

Settings = TypeVar("Settings", bound=Config)
UNREADABLE = (YAMLError, OmegaConfBaseException)


def load_settings(
    kind: type[Settings],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Settings:
    """Reads settings from a YAML file, and from overrides and flags, which override the file.

    Keys are dotted paths (`train.learning_rate`). fill adds settings that the user left out, after
    the given ones have been checked. Raises ConfigError naming the key, the value and the nearest
    known name, also for settings that are given but not used (`check_read`).
    """
    types = {name: plain_types(field.annotation) for name, field in fields_of(kind).items()}
    texts = [name for name, plain in types.items() if plain <= {str, Path, NoneType}]
    values = merge_values(file, overrides, flags, texts)
    if fill is not None:
        check_settings(kind, values)
        values = fill(values)
    settings = validate_settings(kind, values)
    check_read(settings, merge_values(file), in_file=True)
    check_read(settings, merge_values(None, overrides, flags, texts))
    return settings


def check_read(
    settings: Config,
    given: Mapping[str, Any],
    prefix: str = "",
    in_file: bool = False,
    unread: Sequence[tuple[CountsFor, str]] = (),
) -> None:
    """Raises ConfigError for a setting that is given but not used: see `CountsFor`.

    given: nested mappings. Values of 0, false or empty are never an error, nor are defaults in a
    file, which may list all settings. prefix: the dotted prefix of the names. unread: marks of an
    enclosing group that is not used, with the prefix of its class.
    """
    for name, value in given.items():
        setting, field = getattr(settings, name), type(settings).model_fields[name]
        marks = [(mark, at) for mark, at in unread if not mark.names or name in mark.names]
        conditions = [mark for mark in field.metadata if isinstance(mark, CountsFor)]
        marks += [(mark, prefix) for mark in conditions if not mark.holds(settings)]
        groups = setting if isinstance(setting, dict) else {"": setting}
        if isinstance(value, Mapping) and all(isinstance(one, Config) for one in groups.values()):
            for key, group in groups.items():
                below = f"{prefix}{name}.{key}." if key else f"{prefix}{name}."
                check_read(group, value.get(key, {}) if key else value, below, in_file, marks)
        elif marks and setting and not (in_file and setting == field.default):
            mark, above = marks[0]
            raise ConfigError(
                f"{prefix}{name} = {value!r} is used only with {above}{mark.remedy}; give that, or "
                "leave it out"
            )


def merge_values(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    texts: Collection[str] = (),
) -> dict[str, Any]:
    """Returns the given settings as nested mappings, before defaults and types are applied.

    texts: names of settings whose overrides are text, even where it is YAML: `no`, `{question}`.
    """
    values = OmegaConf.create() if file is None else _read_yaml(file)
    given = [(*_parse(override, texts), override) for override in overrides]
    overridden = dict(leaf for key, value, _ in given for leaf in _leaves(key, value))
    for name, whole in (flags or {}).items():
        for key, value in _leaves(name, whole) if whole is not None else ():
            given.append((key, value, key))
            if str(overridden.get(key, value)) != str(value):
                raise ConfigError(
                    f"{key} = {overridden[key]}, but its option is {value}; give one of the two"
                )
    for key, value, shown in given:
        try:
            OmegaConf.update(values, key, value, merge=False)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{shown!r} cannot be set: {_problem(error)}") from None
    return OmegaConf.to_container(values, resolve=False)


def validate_settings(
    kind: type[Settings], values: Mapping[str, Any], within: str = ""
) -> Settings:
    """Makes settings from nested mappings, which the user wrote in the group `within`, if any.

    Raises ConfigError for the first mistake.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(kind, error, within)) from None


def check_settings(kind: type[Config], values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a wrong setting, but not for a missing one: a run may provide it."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        if any(one["type"] != "missing" for one in error.errors()):
            raise ConfigError(explain(kind, error)) from None


def settings_of_group(
    kind: type[Settings], group: str, given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Settings:
    """Makes settings of a command from those fixed by a recipe and those of one of its groups.

    Raises ConfigError for a setting that is in both and for the first mistake.
    """
    if clash := sorted(given.keys() & fixed.keys()):
        raise ConfigError(f"{group}.{clash[0]}: give it as {clash[0]}= at the top level")
    settings = validate_settings(kind, {**fixed, **given}, within=group)
    check_read(settings, given, f"{group}.", in_file=True)
    return settings


def dump_settings(settings: Config) -> str:
    """Returns the settings as YAML, with every field."""
    return OmegaConf.to_yaml(settings.model_dump(mode="json"))


def first_problem(error: ValidationError) -> str:
    """Returns the first mistake in a file and its location, in one line."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    is_group = first["type"] in ("missing", "json_invalid") or isinstance(first["input"], dict)
    given = "" if is_group else f" = {first['input']!r}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}{given}: {message}" if where else message


def explain(kind: type[Config], error: ValidationError, within: str = "") -> str:
    """Returns the first mistake in settings of a class: setting, value and remedy."""
    # A misspelt key also leaves another key missing; report the misspelling.
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(), key=lambda one: order.get(one["type"], 1))
    prefix = f"{within}." if within else ""
    known = {prefix + path: field for path, field in fields_of(kind).items()}
    name = prefix + ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        unknown = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        if len(unknown) == 1:
            return f"unknown setting {name!r}; {_suggest(name, known)}"
        names = ", ".join(repr(prefix + ".".join(map(str, where))) for where in unknown)
        return f"unknown settings {names}; leave them out"
    below = {path: field for path, field in known.items() if path.startswith(f"{name}.")}
    needed = next((path for path, field in below.items() if field.is_required()), name)
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"setting {needed!r} is missing; give {needed}=VALUE or put it in the YAML file"
    message = first["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    if first["type"] == "string_type":
        message = "a string is needed; put it in quotes"
    if below and first["type"] == "model_type":
        message = f"this is a group of settings; give one of them, as {needed}={first['input']}"
    return f"{name} = {first['input']!r}: {message}"


def _suggest(wrong: str, known: Iterable[str]) -> str:
    """Returns the remedy for an unknown name: the known name whose last part is spelt most like its
    own, else the names of its group."""
    last_of = {name: name.rpartition(".")[2] for name in known}
    group, _, last = wrong.rpartition(".")
    similar = difflib.get_close_matches(last, sorted(set(last_of.values())), n=1)
    among = [name for name, last in last_of.items() if last in similar]
    if near := difflib.get_close_matches(wrong, among, n=1, cutoff=0.0):
        return f"did you mean {near[0]!r}?"
    members = sorted(last for name, last in last_of.items() if name.rpartition(".")[0] == group)
    return f"known here: {', '.join(members)}"


def recipe_file(file: Path) -> Path:
    """Returns the file, or for a missing `recipes/NAME` that of the package."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):  # an installed package has recipes/ inside
        if file.parent == Path("recipes") and not file.exists() and (folder / file).is_file():
            return folder / file
    return file


def _read_yaml(file: Path) -> DictConfig:
    file = recipe_file(file)
    if not file.is_file():
        raise ConfigError(f"no settings file {str(file)!r}; give an existing YAML file")
    try:
        values = OmegaConf.load(file)
    except (*UNREADABLE, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file} is not valid YAML in UTF-8 ({_problem(error)}); correct the file"
        ) from None
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{file} has no settings; write a mapping of keys, such as `out: FOLDER`")
    return values


def _parse(override: str, texts: Collection[str] = ()) -> tuple[str, Any]:
    """Returns key and value of `a.b=c`. The value is parsed as YAML, but plain text is kept, and
    every value of `texts` that is not null or quoted."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r} is not key=value; write it as train.seed=1")
    is_null, is_quoted = text.lower() in ("", "~", "null"), text.lstrip().startswith(("'", '"'))
    if key in texts and not is_null and not is_quoted:
        return key, text
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except UNREADABLE as error:
        raise ConfigError(
            f"{override!r}: the value is not valid YAML ({_problem(error)}); put text in quotes, "
            f"as {key}='\"TEXT\"'"
        ) from None
    is_yaml = is_null or is_quoted or text.lstrip().startswith("{")
    is_text = not is_yaml and isinstance(value, dict | str | None)
    return key, text if is_text else value  # data.prefix="## Question: " is meant as text


def _leaves(key: str, value: Any) -> list[tuple[str, Any]]:
    """Returns all single settings in a value with their dotted names."""
    if not isinstance(value, Mapping):
        return [(key, value)]
    return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner)]


def _problem(error: Exception) -> str:
    """Returns the error message with its location, in one line."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split("\n")[0].split())
