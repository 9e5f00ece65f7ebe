"""What is wrong with settings, in one line: where, the value given, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from drafttrain.config.base import Config
from drafttrain.config.fields import setting_names, settings_below

SUGGESTIONS = 3
"""Most names that an unknown one is answered with."""


def explain(kind: type[Config], error: ValidationError, within: str = "") -> str:
    """The first mistake in settings of a kind, for their user.

    within: the group that the user wrote them in, if any.
    """
    # A misspelt key leaves another one missing; the misspelling is what the user must mend.
    order = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(), key=lambda one: order.get(one["type"], 1))
    kind_of_error, keys, given = first["type"], first["loc"], first["input"]
    prefix = f"{within}." if within else ""
    location = prefix + ".".join(map(str, keys))
    not_a_group = f"{location} = {given!r} is a value, not a group of settings"
    if kind_of_error == "extra_forbidden":
        return f"unknown setting {location!r}; {_suggest(kind, keys, prefix)}"
    if kind_of_error == "missing" and isinstance(keys[-1], int):
        whole, place = location.rpartition(".")[0], keys[-1] + 1
        return f"{whole} = {list(given)}: value {place} is missing; give all values"
    if kind_of_error == "missing":
        needed = prefix + _first_needed(kind, keys)
        return f"setting {needed!r} is missing; give {needed}=VALUE or put it in the YAML file"
    if kind_of_error in ("model_type", "model_attributes_type"):
        inside = prefix + _first_needed(kind, keys)
        remedy = "leave it out" if inside == location else f"give {inside}={given}"
        return f"{not_a_group}; {remedy}"
    if kind_of_error == "dict_type":
        return f"{not_a_group}; give {location}.NAME=VALUE"
    if kind_of_error == "tuple_type":
        return f"{location} = {given!r} is one value; give a list, as [{given}]"
    message = first["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    return f"{location} = {given!r}: {message}"


def _suggest(kind: type[Config], location: Sequence[Any], prefix: str) -> str:
    """What an unknown name may have been meant for, as dotted names.

    A setting of just this name in another group; else one that is spelt nearly so beside it; else
    one that is spelt nearly so in any group; else all names that are known beside it.
    """
    wrong, above = str(location[-1]), [*map(str, location[:-1])]
    group = settings_below(kind, above)
    beside = [] if group is None else [".".join([*above, name]) for name in group.model_fields]
    everywhere = setting_names(kind)
    found = [name for name in everywhere if _last(name) == wrong]
    for names in (beside, everywhere):
        if not found:
            near = difflib.get_close_matches(wrong, dict.fromkeys(map(_last, names)), n=1)
            found = [name for name in names if _last(name) in near]
    if found:
        shown = [repr(prefix + name) for name in found[:SUGGESTIONS]]
        return f"did you mean {' or '.join(shown)}?"
    return f"known here: {', '.join(sorted(map(_last, beside)))}"


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _first_needed(kind: type[Config], location: Sequence[Any]) -> str:
    """A missing group of settings is named by the first setting in it that has no default."""
    names = [str(part) for part in location]
    here = settings_below(kind, names)
    while here is not None:
        required = next((name for name, f in here.model_fields.items() if f.is_required()), None)
        if required is None:
            break
        names.append(required)
        here = settings_below(here, [required])
    return ".".join(names)
