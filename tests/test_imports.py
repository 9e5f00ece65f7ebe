"""The project's import rules, checked on all import statements.

Statements inside functions and under TYPE_CHECKING count too.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "drafttrain"

MAY_IMPORT = {
    "config": "",
    "models": "config",
    "decoding": "models config",
    "data": "decoding models config",
    "training": "data decoding models config",
    "build": "data decoding models config",
    "evaluation": "build data decoding models config",
    "export": "build data decoding models config",
    "commands": "export evaluation build data decoding models config",
    "cli": "commands export evaluation build data decoding models config",
    "__main__": "cli",
}
"""Packages that a package may import, besides itself."""

LIGHT = {"config", "cli.py", "__main__.py", "commands/shell.py", "commands/options.py"}
"""Modules loaded before arguments are checked, which import nothing heavy at module level."""
HEAVY = {"torch", "transformers", "datasets", "accelerate", "matplotlib", "sacrebleu", "pandas"}

FILES = {
    file.relative_to(PACKAGE): ast.parse(file.read_text(encoding="utf-8"))
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.name != "__init__.py"
}
"""Syntax trees by path in the package."""


def room_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    return ".".join(("drafttrain", *file.with_suffix("").parts))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the dotted names in the import statements among some nodes."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms(names: Iterable[str]) -> set[str]:
    """Returns the packages of ours that dotted names are of."""
    return {name.split(".")[1] for name in names if name.startswith("drafttrain.")}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_package_imports_only_what_the_table_allows(file):
    own = {room_of(file), "__version__"}
    assert rooms(imported(ast.walk(FILES[file]))) - own <= set(MAY_IMPORT[room_of(file)].split())


def test_no_module_imports_itself_through_others():
    known = {module_of(file) for file in FILES}
    names = {module_of(file): imported(ast.walk(tree)) for file, tree in FILES.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            found = names[module] | {name.rpartition(".")[0] for name in names[module]}
            for other in sorted(found & known):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(known):
        visit(module, ())


def test_the_package_root_has_only_the_command_line():
    loose = {file.name for file in PACKAGE.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "cli.py"}
    folders = {place.name for place in PACKAGE.iterdir() if place.is_dir()} - {"__pycache__"}
    assert folders == MAY_IMPORT.keys() - {"cli", "__main__"}


@pytest.mark.parametrize("place", sorted(LIGHT))
def test_settings_and_command_line_load_nothing_heavy(place):
    chosen = [file for file in FILES if file.is_relative_to(place)]
    assert chosen
    for file in chosen:
        names = imported(FILES[file].body)
        assert not {name.split(".")[0] for name in names} & HEAVY, file
        assert rooms(names) <= {"config", "cli", "commands", "__version__"}, file
