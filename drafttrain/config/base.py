"""What all settings have in common, and the errors that end a command in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

Precision = Literal["float32", "bfloat16", "float16"]


class ConfigError(ValueError):
    """A setting is wrong. The message names the field, the value and the remedy."""


class Interrupted(Exception):
    """Work was asked to stop and has been saved; the message says where."""


def split_at_commas(value: object) -> object:
    """`a,b` as [a, b] and a number as the only one, for lists of settings; all else as it is."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if type(value) in (int, float) else value


class Config(BaseModel):
    """Base of all settings: frozen, unknown keys refused.

    The string under a field is its description, said once: docs/settings.md shows the whole, the
    help of an option its first sentence and its default (the sentence that opens with "Default:").
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
    former_names: ClassVar[Mapping[str, str]] = {}
    """Former name of a setting, as earlier runs recorded it -> its name."""

    @model_validator(mode="before")
    @classmethod
    def _take_former_names(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not cls.former_names.keys() & values.keys():
            return values
        known = {name: value for name, value in values.items() if name not in cls.former_names}
        for former, name in cls.former_names.items():
            if former in values:
                known.setdefault(name, values[former])
        return known
