"""Writes docs/settings.md from the settings classes: `python docs/make_settings.py [--check]`.

Names, types, bounds, defaults and descriptions are read from the pydantic models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from inspect import get_annotations
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from drafttrain.config import commands, decode, inputs, recipes
from drafttrain.config.base import Config, settings_class

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

PAGE = Path(__file__).with_name("settings.md")
MODULES = (inputs, decode, commands, recipes)
HEAD = """# Settings

Generated from [drafttrain/config](../drafttrain/config) by `python docs/make_settings.py`.

A setting is a line of a YAML file (`--config FILE`) or a `key=value` on the command line, which
overrides the file. A dot leads into a group: `train.learning_rate=3e-4`,
`server.extra_body={min_p: 0.1}`. A setting that is text takes what is typed; in a file, text that
YAML reads otherwise (`no`, `012`) needs quotes. Options such as `--k` are short names of settings.
An unknown name is an error that suggests the nearest known one. A run writes all its settings to
`run.yaml`. The fields of `policy.json`, which `drafttrain tune` writes, are in
[evaluate](evaluate.md#policyjson).
"""
WORDS = {
    str: "text",
    bool: "true or false",
    int: "integer",
    float: "number",
    Path: "path",
    Any: "any value",
    NoneType: "null",
}


def settings_classes(module: ModuleType) -> list[type[Config]]:
    """Returns the settings classes of a module in order of definition."""
    return [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Config)
        and kind.__module__ == module.__name__
    ]


def page() -> str:
    """Returns the text of the page."""
    contents = [HEAD]
    for module in MODULES:
        subject = str(module.__doc__).splitlines()[0].removesuffix(".")
        linked = ", ".join(link(kind) for kind in settings_classes(module))
        contents.append(f"- {subject}: {linked}")
    sections = [section(kind) for module in MODULES for kind in settings_classes(module)]
    return "\n".join([*contents, "", *sections])


def link(kind: type[Config]) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def section(kind: type[Config]) -> str:
    """Returns a class's description, links to its base classes, and a table of its settings."""
    lines = [f"## {kind.__name__}", "", description(kind.__doc__), ""]
    if shared := [link(base) for base in kind.__bases__ if base is not Config]:
        lines += [f"It also has the settings of {' and '.join(shared)}.", ""]
    lines += ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name in get_annotations(kind):
        field = kind.model_fields[name]
        cells = [f"`{name}`", values(field), default(field), about(field)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def description(text: str | None) -> str:
    """Returns a class's docstring without indentation."""
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def about(field: FieldInfo) -> str:
    """Returns a setting's description; for a group without one, that of its class."""
    group = settings_class(field.annotation)
    if field.description is None and group is not None:
        return " ".join(group.__doc__.split()).partition(". ")[0].removesuffix(".") + "."
    return " ".join((field.description or "").split())


def values(field: FieldInfo) -> str:
    """Returns the allowed values of a setting in words."""
    annotation, bounds = field.annotation, field.metadata
    if bounds and NoneType in get_args(annotation):  # null is not bounded
        return f"{bounded(in_words(get_args(annotation)[0]), bounds)}; or null"
    return bounded(in_words(annotation), bounds)


def in_words(annotation: Any) -> str:
    """Returns a type in words, including bounds of its parts."""
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return bounded(in_words(parts[0]), parts[1:])
    if kind in (Union, UnionType):
        shown = [in_words(part) for part in parts]
        return ("; or " if any("," in one for one in shown) else " or ").join(shown)
    if kind is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if kind is dict:
        return f"mapping of {in_words(parts[0])} to {in_words(parts[1])}"
    if kind in (tuple, list):
        inside = [in_words(part) for part in parts if part is not ...]
        return f"list of {', '.join(dict.fromkeys(inside))}"
    return WORDS[annotation] if annotation in WORDS else link(annotation)


def bounded(words: str, bounds: Sequence[Any]) -> str:
    """Returns the name of a type with its bounds."""
    found = []
    for bound in bounds:
        if isinstance(bound, FieldInfo):
            return bounded(words, bound.metadata)
        if isinstance(bound, Gt) and words == "integer":
            found.append(f", {bound.gt + 1} or more")
        elif isinstance(bound, Gt):
            found.append(f" above {number(bound.gt)}")
        elif isinstance(bound, Ge):
            found.append(f", {number(bound.ge)} or more")
        elif isinstance(bound, Lt):
            found.append(f", below {number(bound.lt)}")
        elif isinstance(bound, Le):
            found.append(f", up to {number(bound.le)}")
        elif isinstance(bound, MinLen):
            found.append("; not empty")
    return "".join([words, *found])


def number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def default(field: FieldInfo) -> str:
    """Returns the default as YAML; the defaults of a group are in its own table."""
    if field.is_required():
        return "**needed**"
    return "as below" if isinstance(field.default, Config) else f"`{shown(field.default)}`"


def shown(value: Any) -> str:
    known = {None: "null", True: "true", False: "false", "": '""'}
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, bool | str | None) and value in known:
        return known[value]
    return str(value)


def main() -> None:
    """Writes the page; with --check it only compares, and fails if the page is out of date."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is out of date; run: python docs/make_settings.py")


if __name__ == "__main__":
    main()
