"""The project's import rules, checked on all import statements.

Statements inside functions and under TYPE_CHECKING count too.
"""

import ast
from collections.abc import Iterator
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

LIGHT = {"config", "cli", "__main__", "commands/shell.py", "commands/options.py"}
"""Modules loaded before arguments are checked, which import nothing heavy at module level."""
HEAVY = {"torch", "transformers", "datasets", "accelerate", "matplotlib", "sacrebleu", "pandas"}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported(statement: ast.AST, file: Path) -> list[str]:
    """Returns the dotted names in an import statement."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if not isinstance(statement, ast.ImportFrom):
        return []
    assert statement.level == 0, f"{file}: a relative import"
    return [f"{statement.module}.{alias.name}" for alias in statement.names]


def names_in(nodes: Iterator[ast.AST], file: Path) -> set[str]:
    return {name for node in nodes for name in imported(node, file)}


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def files() -> list[Path]:
    return sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")


def modules_imported(file: Path, known: set[str]) -> set[str]:
    """Returns our modules that a file imports, directly or by one of their names."""
    found = set()
    for name in names_in(ast.walk(parse(file)), file):
        if name in known:
            found.add(name)
        elif name.rpartition(".")[0] in known:
            found.add(name.rpartition(".")[0])
    return found


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_package_imports_only_what_the_table_allows(file):
    names = names_in(ast.walk(parse(file)), file)
    rooms = {name.split(".")[1] for name in names if name.startswith("drafttrain.")}
    assert rooms - {room_of(file), "__version__"} <= set(MAY_IMPORT[room_of(file)].split())


def test_no_module_imports_itself_through_others():
    known = {module_of(file) for file in files()}
    imports = {module_of(file): modules_imported(file, known) for file in files()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in sorted(imports[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(known):
        visit(module, ())


def test_the_package_root_has_only_the_command_line():
    loose = {file.name for file in PACKAGE.glob("*.py")}
    assert loose == {"__init__.py", "__main__.py", "cli.py"}
    rooms = {place.name for place in PACKAGE.iterdir() if place.is_dir()} - {"__pycache__"}
    assert rooms == MAY_IMPORT.keys() - {"cli", "__main__"}


@pytest.mark.parametrize("place", sorted(LIGHT))
def test_settings_and_command_line_load_nothing_heavy(place):
    path = PACKAGE / place
    chosen = [file for file in files() if file == path or path in file.parents]
    chosen = chosen or [path.with_suffix(".py")]
    for file in chosen:
        names = names_in(iter(parse(file).body), file)
        assert not {name.split(".")[0] for name in names} & HEAVY, file
        ours = {name.split(".")[1] for name in names if name.startswith("drafttrain.")}
        assert ours <= {"config", "cli", "commands", "__version__"}, file
