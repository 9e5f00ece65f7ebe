"""docs/settings.md is up to date with the settings classes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from drafttrain.config.base import Config
from drafttrain.config.policy import Policy

SCRIPT = Path(__file__).parents[2] / "docs" / "make_settings.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_settings", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    found = script.PAGE.read_text(encoding="utf-8")
    assert found == script.page(), "run: python docs/make_settings.py"


def test_every_settings_class_is_on_the_page_and_every_setting_is_described(script):
    shown = [kind for module in script.MODULES for kind in script.settings_classes(module)]
    ours = {kind for kind in all_below(Config) if kind.__module__.startswith("drafttrain.config.")}
    assert set(shown) == ours - {Policy}
    pages = [script.section(kind) for kind in shown]
    listed = [line.split("`")[1] for text in pages for line in text.splitlines() if "| `" in line]
    assert set(listed) == {name for kind in shown for name in kind.model_fields}
    for kind in shown:
        assert all(map(script.about, kind.model_fields.values())), kind


def all_below(kind: type) -> list[type]:
    return [one for below in kind.__subclasses__() for one in (below, *all_below(below))]
