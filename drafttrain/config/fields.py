"""Settings by their dotted names: which there are, and what each one's class says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from drafttrain.config.base import Config

SENTENCE_END = re.compile(r"(?<=[.?!])\s+")


def find_field(kind: type[Config], name: str) -> FieldInfo:
    """The field that a dotted name (`decode.stop.k`) leads to. KeyError where there is none."""
    *groups, last = name.split(".")
    below = settings_below(kind, groups)
    if below is None:
        raise KeyError(f"{kind.__name__} has no {name!r}")
    return below.model_fields[last]


def settings_below(kind: type[Config], location: Sequence[Any]) -> type[Config] | None:
    """The settings class that a path of keys leads to; None where it leads to a plain value."""
    here: type[Config] | None = kind
    keys = iter(location)
    for key in keys:
        if here is None or key not in here.model_fields:
            return None
        inside = here.model_fields[key].annotation
        mapping = next((one for one in plain_types(inside) if get_origin(one) is dict), None)
        if mapping is not None:  # others.NAME.drafter: any name leads on
            next(keys, None)
            inside = get_args(mapping)[1]
        here = settings_class(inside)
    return here


def setting_names(kind: type[Config]) -> list[str]:
    """Dotted names of all settings, groups before what is in them."""
    names = []
    for name, field in kind.model_fields.items():
        names.append(name)
        group = settings_class(field.annotation)
        if group is not None:
            names += [f"{name}.{below}" for below in setting_names(group)]
    return names


def settings_class(annotation: Any) -> type[Config] | None:
    """The class of a group of settings; None for plain values."""
    found = (k for k in plain_types(annotation) if isinstance(k, type) and issubclass(k, Config))
    return next(found, None)


def plain_types(annotation: Any) -> list[Any]:
    """The types that a value may have: what is joined by |, without bounds and without None."""
    if get_origin(annotation) is Annotated:
        return plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in plain_types(part)]
    return [] if annotation in (None, type(None)) else [annotation]


def choices(annotation: Any) -> tuple[str, ...]:
    """The values of a setting that takes one of a few; () for others."""
    literals = [kind for kind in plain_types(annotation) if get_origin(kind) is Literal]
    return tuple(str(value) for literal in literals for value in get_args(literal))


def sentences(text: str | None) -> list[str]:
    """A description's sentences, each on one line."""
    return [part for part in SENTENCE_END.split(" ".join((text or "").split())) if part]
