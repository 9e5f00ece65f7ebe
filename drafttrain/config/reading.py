"""From what a user wrote, a YAML file, `key=value` and flags, to settings.

OmegaConf reads and merges; text such as `${name}` stays as it is written and is never resolved.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import MarkedYAMLError, YAMLError

from drafttrain.config.base import Config, ConfigError, CountsFor, fields_of

Settings = TypeVar("Settings", bound=Config)
UNREADABLE = (YAMLError, OmegaConfBaseException)


def load_settings(
    kind: type[Settings],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> Settings:
    """Settings from a YAML file, then `key=value` overrides, then command-line flags.

    The command line wins over the file. Keys are dotted paths (`train.learning_rate`). fill adds
    what the user left out, once what was given is known to be right. Raises ConfigError naming the
    key, the value and the nearest known name; also for what is given but not read (`check_read`).
    """
    written, typed = merge_values(file), merge_values(None, overrides, flags)
    values = merge_values(file, overrides, flags)
    if fill is not None:
        check_settings(kind, values)
        values = fill(values)
    settings = validate_settings(kind, values)
    check_read(settings, written, in_file=True)
    check_read(settings, typed)
    return settings


def check_read(
    settings: Config,
    given: Mapping[str, Any],
    prefix: str = "",
    in_file: bool = False,
    unread: Sequence[tuple[CountsFor, str]] = (),
) -> None:
    """Refuse settings that are given, as nested mappings, but not read: see `CountsFor`.

    What is 0, false or empty asks for nothing, nor does a default in a file, which may write all
    out. prefix: of their names. unread: marks of a group that is not read, with the prefix of its
    class. Raises ConfigError.
    """
    for name, value in given.items():
        own, field = getattr(settings, name), type(settings).model_fields[name]
        marks = [one for one in unread if not one[0].names or name in one[0].names]
        conditions = [one for one in field.metadata if isinstance(one, CountsFor)]
        marks += [(one, prefix) for one in conditions if not one.holds(settings)]
        groups = own if isinstance(own, dict) else {"": own}
        if isinstance(value, Mapping) and all(isinstance(one, Config) for one in groups.values()):
            for key, group in groups.items():
                below = f"{prefix}{name}.{key}." if key else f"{prefix}{name}."
                check_read(group, value.get(key, {}) if key else value, below, in_file, marks)
        elif marks and own and not (in_file and own == field.default):
            mark, above = marks[0]
            raise ConfigError(
                f"{prefix}{name} = {value!r} counts only with {above}{mark.remedy}; give that, or "
                "leave it out"
            )


def merge_values(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the user wrote, as nested mappings, before defaults and types are applied."""
    values = OmegaConf.create() if file is None else _read_yaml(file)
    given = [(*_parse(override), override) for override in overrides]
    said = dict(leaf for key, value, _ in given for leaf in _leaves(key, value))
    for key, value in (flags or {}).items():
        if value is not None:
            given.append((key, value, key))
            if str(said.get(key, value)) != str(value):
                raise ConfigError(
                    f"{key} = {said[key]}, but its option says {value}; give one of the two"
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
    """Settings of a kind from nested mappings. Raises ConfigError on the first thing wrong.

    within: the group that the user wrote them in, if any.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(kind, error, within)) from None


def check_settings(kind: type[Config], values: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is wrong, but not for what is missing: a run may fill it in."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        if any(one["type"] != "missing" for one in error.errors()):
            raise ConfigError(explain(kind, error)) from None


def settings_of_group(
    kind: type[Settings], group: str, given: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Settings:
    """Settings of a command, of which a recipe fixes some and a group of it gives others.

    Raises ConfigError for one that is in both, and on the first thing wrong.
    """
    if clash := sorted(given.keys() & fixed.keys()):
        raise ConfigError(f"{group}.{clash[0]}: give it as {clash[0]}= at the top level")
    settings = validate_settings(kind, {**fixed, **given}, within=group)
    check_read(settings, given, f"{group}.", in_file=True)
    return settings


def dump_settings(settings: Config) -> str:
    """The settings as YAML, every field written out."""
    return OmegaConf.to_yaml(settings.model_dump(mode="json"))


def first_problem(error: ValidationError) -> str:
    """Where a file departs from what it should hold, and how: the first place, in one line."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    is_group = first["type"] in ("missing", "json_invalid") or isinstance(first["input"], dict)
    given = "" if is_group else f" = {first['input']!r}"
    return f"{where}{given}: {first['msg']}" if where else first["msg"]


def explain(kind: type[Config], error: ValidationError, within: str = "") -> str:
    """The first mistake in settings of a kind: where, the value given, what to write instead."""
    # A misspelt key leaves another one missing; the misspelling is what the user must mend.
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(), key=lambda one: order.get(one["type"], 1))
    prefix = f"{within}." if within else ""
    known = {prefix + one: field for one, field in fields_of(kind).items()}
    name = prefix + ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        unknown = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        if len(unknown) > 1:
            names = ", ".join(repr(prefix + ".".join(map(str, where))) for where in unknown)
            return f"unknown settings {names}; leave them out"
        return f"unknown setting {name!r}; {_suggest(name, known)}"
    below = [one for one in known.items() if one[0].startswith(f"{name}.")]
    needed = next((one for one, field in below if field.is_required()), name)
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return f"setting {needed!r} is missing; give {needed}=VALUE or put it in the YAML file"
    message = first["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    if below and first["type"] == "model_type":
        message = f"not a group of settings; name one in it, as {needed}={first['input']}"
    return f"{name} = {first['input']!r}: {message}"


def _suggest(wrong: str, known: Iterable[str]) -> str:
    """Of the settings whose last part is spelt most like the unknown one's the most similar; else
    all that are known beside it."""
    last_of = {name: name.rpartition(".")[2] for name in known}
    group, _, last = wrong.rpartition(".")
    alike = difflib.get_close_matches(last, sorted(set(last_of.values())), n=1)
    among = [name for name, own in last_of.items() if own in alike]
    if near := difflib.get_close_matches(wrong, among, n=1, cutoff=0.0):
        return f"did you mean {near[0]!r}?"
    beside = sorted(own for name, own in last_of.items() if name.rpartition(".")[0] == group)
    return f"known here: {', '.join(beside)}"


def recipe_file(file: Path) -> Path:
    """The file as named; `recipes/NAME` that is not there is the one that came with the package: a
    checkout has recipes next to it, an installed package inside."""
    package = Path(__file__).parents[1]
    for folder in (package, package.parent):
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
            f"{file} is not valid YAML in UTF-8 ({_problem(error)}); mend it there"
        ) from None
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{file} holds no settings; write a mapping of keys, as `out: FOLDER`")
    return values


def _parse(override: str) -> tuple[str, Any]:
    """Key and value of `a.b=c`, the value read as YAML."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r} is no override: write key=value, as train.seed=1")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except UNREADABLE as error:
        raise ConfigError(
            f"{override!r}: the value is not valid YAML ({_problem(error)}); put text in quotes, "
            f"as {key}='\"TEXT\"'"
        ) from None
    is_text = isinstance(value, dict) and not text.lstrip().startswith("{")
    return key, text if is_text else value  # data.prefix="Question: " is meant as text


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All single settings in a value, by their dotted names."""
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, one in value.items():
        yield from _leaves(f"{key}.{name}", one)


def _problem(error: Exception) -> str:
    """What is wrong and where, in one line."""
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark):
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split("\n")[0].split())
