"""Write docs/settings.md from the settings classes: `python docs/make_settings.py [--check]`.

Names, types, defaults and texts are read from the source of drafttrain/config.py, where each
field's documentation is the string under it.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "drafttrain" / "config.py"
PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Made from [drafttrain/config.py](../drafttrain/config.py) by `python docs/make_settings.py`.

A setting is a line of a YAML file (`--config FILE`) or a `key=value` on the command line, which
wins; a dot leads into a group: `train.learning_rate=3e-4`, `data.where={category: qa}`. Options
such as `--k` are short for one of them. Unknown names are refused with the nearest known one, and
a run writes all its settings into `run.yaml`.
"""
WORDS = {
    "str": "text",
    "bool": "true or false",
    "int": "integer",
    "float": "number",
    "Path": "path",
    "Any": "any value",
    "PositiveInt": "integer, 1 or more",
    "NonNegativeInt": "integer, 0 or more",
    "PositiveFloat": "number above 0",
    "NonNegativeFloat": "number, 0 or more",
    "None": "null",
}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


@dataclass(frozen=True)
class Setting:
    """One field of a settings class."""

    name: str
    kind: str
    default: str | None
    """None: it must be given."""
    text: str


@dataclass(frozen=True)
class Group:
    """One settings class."""

    name: str
    text: str
    settings: list[Setting]


def read_groups(source: str) -> list[Group]:
    """All settings classes, in the order of the source; what others extend is shown in these."""
    module = ast.parse(source)
    aliases = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    fields: dict[str, list[Setting]] = {"Config": []}
    groups, extended = [], set()
    for node in (node for node in module.body if isinstance(node, ast.ClassDef)):
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in fields]
        if not bases:
            continue
        extended.update(bases)
        above = [setting for base in bases for setting in fields[base]]
        fields[node.name] = above + read_settings(node, aliases)
        groups.append(Group(node.name, ast.get_docstring(node) or "", fields[node.name]))
    return [group for group in groups if group.name not in extended]


def read_settings(group: ast.ClassDef, aliases: dict[str, ast.expr]) -> list[Setting]:
    """The annotated fields of a class, each with the string that follows it."""
    found = []
    for node, after in zip(group.body, [*group.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign):
            continue
        documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = " ".join(str(after.value.value).split()) if documented else ""
        default, bounds = read_default(node.value)
        kind = in_words(node.annotation, aliases) + "".join(f", {bound}" for bound in bounds)
        found.append(Setting(node.target.id, kind, default, text))
    return found


def read_default(value: ast.expr | None) -> tuple[str | None, list[str]]:
    """The default as YAML would have it, and the bounds that a Field(...) sets."""
    if value is None:
        return None, []
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        bounds = [f"{BOUNDS[name]} {shown(given[name])}" for name in BOUNDS if name in given]
        return (shown(given["default"]) if "default" in given else None), bounds
    return shown(value), []


def shown(value: ast.expr) -> str:
    """A default in YAML's words; a group's is its own settings' defaults."""
    if isinstance(value, ast.Call):
        return "as below"
    known = {"None": "null", "True": "true", "False": "false", "''": '""', "()": "[]"}
    text = ast.unparse(value)
    if text in known:
        return known[text]
    if isinstance(value, ast.Tuple):
        return f"[{', '.join(shown(one) for one in value.elts)}]"
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else text


def in_words(annotation: ast.expr, aliases: dict[str, ast.expr]) -> str:
    """A type as a reader of YAML thinks of it."""
    if isinstance(annotation, ast.BinOp):
        return f"{in_words(annotation.left, aliases)} or {in_words(annotation.right, aliases)}"
    if isinstance(annotation, ast.Subscript):
        kind = ast.unparse(annotation.value)
        inside = annotation.slice
        parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
        if kind == "Literal":
            return ", ".join(f"`{part.value}`" for part in parts)
        listed = [in_words(part, aliases) for part in parts if ast.unparse(part) != "..."]
        if kind == "dict":
            return f"mapping of {listed[0]} to {listed[1]}"
        return f"list of {', '.join(dict.fromkeys(listed))}"
    name = ast.unparse(annotation)
    if name in aliases:
        return in_words(aliases[name], aliases)
    if name in WORDS:
        return WORDS[name]
    return f"[{name}](#{name.lower()})"


def page(source: str) -> str:
    """The document."""
    return "\n".join([HEAD, *(section(group) for group in read_groups(source))])


def section(group: Group) -> str:
    lines = [f"## {group.name}", "", group.text, ""]
    lines += ["| setting | values | default | what |", "| --- | --- | --- | --- |"]
    for one in group.settings:
        default = "**needed**" if one.default is None else one.default
        if one.default is not None and one.default != "as below":
            default = f"`{default}`"
        cells = [f"`{one.name}`", one.kind, default, one.text]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """The command above; with --check it only compares, and fails where the page is old."""
    text = page(SOURCE.read_text(encoding="utf-8"))
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is out of date; run: python docs/make_settings.py")


if __name__ == "__main__":
    main()
