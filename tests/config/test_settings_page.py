"""docs/settings.md says what the settings classes say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from drafttrain.config.base import Config

SCRIPT = Path(__file__).parents[2] / "docs" / "make_settings.py"


class Inner(Config):
    """Inside. Not shown."""

    deep: bool = False


class Shape(Config):
    """A shape.

    Two lines."""

    width: PositiveInt
    """How wide,
    in cells."""
    share: float = Field(default=0.5, gt=0.0, le=1.0)
    kind: Literal["float32", "bfloat16"] | None = None
    """float32 | bfloat16."""
    chance: float | None = Field(default=None, ge=0.0, lt=1.0)
    inner: Inner = Inner()
    other: Inner | None = None
    names: tuple[str, ...] = ("a", "b")
    rows: tuple[tuple[NonNegativeInt, ...], ...] = Field(default=((1,),), min_length=1)
    scales: tuple[Annotated[float, Field(ge=1.0)], ...] = ()
    where: dict[str, PositiveFloat | bool] = {}
    place: Path = Path("a.yaml")
    prefix: str = ""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_settings", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    found = script.PAGE.read_text(encoding="utf-8")
    assert found == script.page(), "run: python docs/make_settings.py"


def test_a_class_becomes_a_table(script):
    assert script.section(Shape).splitlines() == [
        "## Shape",
        "",
        "A shape.",
        "",
        "Two lines.",
        "",
        "| setting | values | default | what |",
        "| --- | --- | --- | --- |",
        "| `width` | integer, 1 or more | **needed** | How wide, in cells. |",
        "| `share` | number above 0, up to 1 | `0.5` |  |",
        "| `kind` | `float32`, `bfloat16`; or null | `null` | float32 \\| bfloat16. |",
        "| `chance` | number, 0 or more, below 1; or null | `null` |  |",
        "| `inner` | [Inner](#inner) | as below | Inside. |",
        "| `other` | [Inner](#inner) or null | `null` | Inside. |",
        "| `names` | list of text | `[a, b]` |  |",
        "| `rows` | list of list of integer, 0 or more; not empty | `[[1]]` |  |",
        "| `scales` | list of number, 1 or more | `[]` |  |",
        "| `where` | mapping of text to number above 0 or true or false | `{}` |  |",
        "| `place` | path | `a.yaml` |  |",
        '| `prefix` | text | `""` |  |',
    ]


def test_every_settings_class_is_on_the_page_and_every_setting_is_described(script):
    shown = [kind for module in script.MODULES for kind in script.settings_classes(module)]
    classes = [kind for kind in all_below(Config) if not kind.__subclasses__()]
    ours = {kind for kind in classes if kind.__module__.startswith("drafttrain.config.")}
    assert set(shown) == ours
    silent = {
        f"{kind.__name__}.{name}"
        for kind in shown
        for name, field in kind.model_fields.items()
        if not script.about(field)
    }
    assert silent == set()


def all_below(kind: type) -> list[type]:
    return [one for below in kind.__subclasses__() for one in (below, *all_below(below))]
