"""What all settings have in common: frozen, unknown keys refused, docstrings under fields kept."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
)

Precision = Literal["float32", "bfloat16", "float16"]


class ConfigError(ValueError):
    """A setting is wrong. The message names the field, the value and the remedy."""


class Interrupted(Exception):
    """Work was asked to stop and has been saved; the message says where."""


class Config(BaseModel):
    """Base of all settings: frozen, unknown keys refused, docstrings under fields kept."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )
