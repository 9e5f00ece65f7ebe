"""What all settings have in common, and the errors that end a command in one line."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

Precision = Literal["float32", "bfloat16", "float16"]


class ConfigError(ValueError):
    """A setting is wrong. The message names the field, the value and the remedy."""


class Interrupted(Exception):
    """Work was asked to stop and has been saved; the message says where."""


class Config(BaseModel):
    """Base of all settings: frozen, unknown keys refused.

    The string under a field is its description, in docs/settings.md and in the help of options.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


def _split_at_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if type(value) in (int, float) else value


Listed = BeforeValidator(_split_at_commas)
"""For lists of settings: `a,b` is [a, b] and a number the only one."""
Count = Annotated[int, Field(ge=1, le=10_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Width = Annotated[int, Field(ge=1, le=2**16)]
Few = Annotated[int, Field(ge=1, le=1024)]
"""What takes memory times something: draft tokens of a round, layers, beams."""
FewOrZero = Annotated[int, Field(ge=0, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]


@dataclass(frozen=True)
class CountsFor:
    """Marks a setting, or a group of them, that is read only where another one is of some values.

    What a user gives without effect is refused (`reading.check_read`).
    """

    remedy: str
    """`name=value`, or `a|b` of several values; of a list one suffices, and `...` is all but 0,
    false, null and nothing. The name is of the same class; dots lead into groups."""
    names: tuple[str, ...] = ()
    """Of a group the settings that this is about. Empty: all."""
    attribute: str | None = None
    """What to look at in place of the name."""

    def holds(self, settings: Config) -> bool:
        """Whether what is marked is read, by the settings of its class."""
        name, _, wanted = self.remedy.partition("=")
        value = attrgetter(self.attribute or name)(settings)
        found = value if isinstance(value, tuple) else (value,)
        known = {"null" if one is None else str(one) for one in found}
        return bool(value) if wanted == "..." else not known.isdisjoint(wanted.split("|"))


def counted(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`, `1,000 inputs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def fields_of(kind: type[Config]) -> dict[str, FieldInfo]:
    """All settings by their dotted names, groups before their own; NAME is any key of a mapping."""
    found = {}
    for name, field in kind.model_fields.items():
        found[name] = field
        group = settings_class(field.annotation)
        below = {} if group is None else fields_of(group)
        above = f"{name}.NAME" if get_origin(field.annotation) is dict else name
        found |= {f"{above}.{inner}": one for inner, one in below.items()}
    return found


def settings_class(annotation: Any) -> type[Config] | None:
    """The class of a group of settings, optional or in a mapping; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next(filter(None, map(settings_class, get_args(annotation))), None)
