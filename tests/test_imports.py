"""The import table of the project: who may import whom. Kept true by reading the statements."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "drafttrain"

MAY_IMPORT = {
    "config": set(),
    "settings": {"config"},
    "options": set(),
    "runs": {"config", "settings"},
    "models": {"config", "settings"},
    "decoding": {"models", "config", "settings"},
    "data": {"decoding", "models", "config", "settings"},
    "training": {"data", "models", "config", "settings"},
    "evaluation": {"decoding", "data", "models", "config", "settings"},
    "export": {"models", "decoding", "config", "settings"},
}
"""Parts of drafttrain that a part may import besides itself."""

MAY_IMPORT_ALL = {
    "build",
    "cascades",
    "cli",
    "commands",
    "export_command",
    "generate",
    "measure",
    "pairs",
    "stops",
    "tune",
    "trees",
    "tune_bench",
    "tune_cascade",
}

LIGHT = {"config", "settings", "runs", "options", "commands", "cli"}
"""Parts that are loaded before any argument is checked, so nothing heavy at module level."""
HEAVY = {"torch", "transformers", "datasets", "accelerate", "matplotlib", "sacrebleu", "pandas"}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(statement: ast.stmt, file: Path) -> list[str]:
    """Dotted names that an import statement names; relative ones made absolute."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if not isinstance(statement, ast.ImportFrom):
        return []
    base = statement.module or ""
    if statement.level:
        folder = file.relative_to(PACKAGE.parent).parent.parts
        above = folder[: len(folder) - statement.level + 1]
        base = ".".join([*above, base]).rstrip(".")
    return [f"{base}.{alias.name}" for alias in statement.names]


def parts_imported(file: Path) -> set[str]:
    names = [n for node in ast.walk(parse(file)) for n in imported(node, file)]
    ours = [name.split(".") for name in names if name.startswith("drafttrain.")]
    return {parts[1] for parts in ours} - {part_of(file)}


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def files() -> list[Path]:
    return sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_part_imports_only_what_the_table_allows(file):
    if part_of(file) not in MAY_IMPORT_ALL:
        assert parts_imported(file) <= MAY_IMPORT[part_of(file)]


@pytest.mark.parametrize("part", sorted(LIGHT))
def test_settings_and_command_line_load_nothing_heavy(part):
    file = PACKAGE / f"{part}.py"
    top = {n.split(".")[0] for s in parse(file).body for n in imported(s, file)}
    assert not top & HEAVY
    ours = {
        n.split(".")[1]
        for s in parse(file).body
        for n in imported(s, file)
        if "." in n and n.startswith("drafttrain.")
    }
    assert ours <= LIGHT


def test_no_file_reads_or_writes_pickles():
    for file in files():
        names = {n.split(".")[0] for node in ast.walk(parse(file)) for n in imported(node, file)}
        assert not names & {"pickle", "dill", "cloudpickle", "shelve"}, file


def test_relative_imports_are_seen_too():
    file = PACKAGE / "decoding" / "drafters" / "none.py"
    statement = ast.parse("from ..loop import decode").body[0]
    assert imported(statement, file) == ["drafttrain.decoding.loop.decode"]
