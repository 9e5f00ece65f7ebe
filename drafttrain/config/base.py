"""Base class of all settings, and the errors that end a command with one line."""

from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

Precision = Literal["float32", "bfloat16", "float16"]


class ConfigError(ValueError):
    """A wrong setting. The message names the field, the value and the remedy."""


class Interrupted(Exception):
    """Work was interrupted after saving its state; the message says where."""


class Config(BaseModel):
    """Base class of settings: frozen, without unknown keys.

    The string under a field is its description in docs/settings.md and in the help of options.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # neither can be written to JSON
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: object, info: ValidationInfo) -> object:
        """Refuses true and false for numbers; pydantic would read them as 1 and 0."""
        kinds = plain_types(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and bool not in kinds and not {int, float}.isdisjoint(kinds):
            raise ValueError("a number is needed, not true or false")
        return value


def plain_types(annotation: Any) -> set[Any]:
    """Returns the types of which a setting's value, or its elements, can be."""
    inner = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
    return set().union(*map(plain_types, inner)) if inner else {annotation}


def settings_class(annotation: Any) -> type[Config] | None:
    """Returns the class of a group of settings, also if optional or in a mapping; else None."""
    kinds = (one for one in plain_types(annotation) if isinstance(one, type))
    return next((kind for kind in kinds if issubclass(kind, Config)), None)


def _split_at_commas(value: object) -> object:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if type(value) in (int, float) else value


Listed = BeforeValidator(_split_at_commas)
"""For settings that are lists: reads `a,b` as [a, b], and a number as a list of one."""
Count = Annotated[int, Field(ge=1, le=10_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
Width = Annotated[int, Field(ge=1, le=2**16)]
Few = Annotated[int, Field(ge=1, le=1024)]
"""For counts that multiply memory: draft tokens per round, layers, beams."""
FewOrZero = Annotated[int, Field(ge=0, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]


@dataclass(frozen=True)
class CountsFor:
    """Marks a setting, or a group, that is used only for certain values of another setting.

    `reading.check_read` refuses a marked setting that is given without effect.
    """

    remedy: str
    """`name=value` or `name=a|b`; dots in the name lead into groups. Of a list, one element
    suffices; `...` is any value except 0, false, null and empty."""
    names: tuple[str, ...] = ()
    """The settings of a marked group that this is about. Empty: all."""
    attribute: str | None = None
    """The attribute to compare instead of the name."""

    def holds(self, settings: Config) -> bool:
        """Whether the marked setting is used; settings is the object that has it."""
        name, _, allowed = self.remedy.partition("=")
        value = attrgetter(self.attribute or name)(settings)
        elements = value if isinstance(value, tuple) else (value,)
        texts = {"null" if element is None else str(element) for element in elements}
        return bool(value) if allowed == "..." else not texts.isdisjoint(allowed.split("|"))


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 thread`, `2 threads`, `1,000 inputs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def fields_of(kind: type[Config]) -> dict[str, FieldInfo]:
    """Returns all settings by dotted names, a group before its members; NAME is any mapping key."""
    fields = {}
    for name, field in kind.model_fields.items():
        fields[name] = field
        group = settings_class(field.annotation)
        if group is not None:
            prefix = f"{name}.NAME" if get_origin(field.annotation) is dict else name
            fields |= {f"{prefix}.{inner}": one for inner, one in fields_of(group).items()}
    return fields
