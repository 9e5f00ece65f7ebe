"""docs/settings.md says what the settings classes say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from drafttrain import config

SCRIPT = Path(__file__).parents[1] / "docs" / "make_settings.py"
SOURCE = '''
Precision = Literal["float32", "bfloat16"]

class Config(BaseModel):
    model_config = ConfigDict(frozen=True)

class Inner(Config):
    """Inside."""

    deep: bool = False

class Shape(Config):
    """A shape.

    Two lines."""

    width: PositiveInt
    """How wide,
    in cells."""
    share: float = Field(default=0.5, gt=0.0, le=1.0)
    kind: Precision | None = None
    """float32 | bfloat16."""
    inner: Inner = Inner()
    names: tuple[str, ...] = ("a", "b")

class Square(Inner):
    """A square."""

    side: int = 1

class Other(BaseModel):
    hidden: int = 1
'''


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_settings", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "make_settings", module)  # for its dataclasses
        spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(script.SOURCE.read_text(encoding="utf-8")), (
        "run: python docs/make_settings.py"
    )


def test_a_class_becomes_a_table(script):
    text = script.page(SOURCE)
    table = text[text.index("## Shape") : text.index("\n## Square")].splitlines()
    assert table == [
        "## Shape",
        "",
        "A shape.",
        "",
        "Two lines.",
        "",
        "| setting | values | default | what |",
        "| --- | --- | --- | --- |",
        "| `width` | integer, 1 or more | **needed** | How wide, in cells. |",
        "| `share` | number, above 0.0, at most 1.0 | `0.5` |  |",
        "| `kind` | `float32`, `bfloat16` or null | `null` | float32 \\| bfloat16. |",
        "| `inner` | [Inner](#inner) | as below |  |",
        "| `names` | list of text | `[a, b]` |  |",
    ]
    assert "hidden" not in text


def test_inherited_settings_come_first_and_what_is_extended_has_no_table(script):
    groups = {group.name: group.settings for group in script.read_groups(SOURCE)}
    assert list(groups) == ["Shape", "Square"]
    assert [setting.name for setting in groups["Square"]] == ["deep", "side"]


def test_every_setting_of_every_class_is_read(script):
    groups = {
        group.name: [setting.name for setting in group.settings]
        for group in script.read_groups(script.SOURCE.read_text(encoding="utf-8"))
    }
    leaves = [kind for kind in all_below(config.Config) if not kind.__subclasses__()]
    classes = {kind.__name__: list(kind.model_fields) for kind in leaves}
    assert groups == {name: classes[name] for name in groups}
    assert set(groups) >= {"DataConfig", "TrainConfig", "ExportConfig", "Policy"}


def all_below(kind: type) -> list[type]:
    return [one for below in kind.__subclasses__() for one in (below, *all_below(below))]
