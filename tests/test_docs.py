"""What the documents name exists: links, files, commands, their options and settings, imports."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

import pytest
import typer

from drafttrain import cli
from drafttrain.commands.train import find_recipe, script_of
from drafttrain.config import commands as verbs
from drafttrain.config import recipes
from drafttrain.config.base import Config, fields_of

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("[!.]*/README.md")),
]


def over(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


PAGE = over(PAGES)
SETTLED_PAGES = [page for page in PAGES if page.name != "extending.md"]
SETTLED_PAGE = over(SETTLED_PAGES)
"""What docs/extending.md adds is no part of the package; tests/test_extending.py runs it."""
FOLDERS = "drafttrain|recipes|benchmarks|docs|launch|tests|data"
SETTINGS: dict[str, type[Config]] = {
    "distill": verbs.DistillConfig,
    "cache": verbs.CacheConfig,
    "bigrams": verbs.BigramsConfig,
    "eval": verbs.EvalConfig,
    "generate": verbs.GenerateConfig,
    "tune": verbs.TuneConfig,
    "export": verbs.ExportConfig,
    "recipes/train_spec_drafter.py": recipes.SpecDrafterRecipe,
    "recipes/train_block_heads.py": recipes.BlockHeadsRecipe,
    "recipes/train_acceptance_head.py": recipes.HeadRecipe,
    "recipes/train_causal_drafter.py": recipes.CausalDrafterRecipe,
    "recipes/train_parallel_drafter.py": recipes.ParallelDrafterRecipe,
    "recipes/train_state_drafter.py": recipes.StateDrafterRecipe,
    "recipes/train_target.py": recipes.TargetRecipe,
    "benchmarks/opt_tree.py": verbs.EvalConfig,
    "benchmarks/train.py": recipes.SpecDrafterRecipe,
    "benchmarks/tree_experiments.py": verbs.EvalConfig,
}
"""Whose settings a `key=value` of the command is, by verb or script."""
GROUPS = {"distill": verbs.DistillConfig, "cache": verbs.CacheConfig}
"""Groups of a recipe's settings that its own class leaves open."""


@PAGE
def test_links_lead_somewhere(page: Path):
    text = without_code(page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@PAGE
def test_rows_of_a_table_have_as_many_cells_as_its_head(page: Path):
    text = without_blocks(page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, line, *rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert {line, *rows} == {head}, table.splitlines()[0]


@PAGE
def test_files_named_exist(page: Path):
    text = without_blocks(page.read_text(encoding="utf-8"))
    for name in re.findall(rf"`((?:{FOLDERS})(?:/[\w.-]+)+)/?`", text):
        assert (ROOT / name).exists(), name
    if page.parent.name in ("benchmarks", "launch"):
        for name in re.findall(r"`([\w-]+\.(?:py|sh|yaml))`", text):
            assert (page.parent / name).exists(), name


@SETTLED_PAGE
def test_commands_have_their_options_settings_and_files(page: Path):
    for words in commands(page.read_text(encoding="utf-8")):
        shown = " ".join(words)
        subject, rest = called(words)
        if subject is None:
            continue
        takes_value = known_options(subject)
        for place, word in enumerate(rest):
            name = word.partition("=")[0]
            if re.match(r"--[a-z]", word):
                assert name in takes_value, f"{name} in: {shown}"
            elif place and takes_value.get(rest[place - 1]):
                continue
            elif subject in SETTINGS and re.match(r"[a-z][a-z_]*(\.[\w-]+)*=", word):
                assert is_setting(SETTINGS[subject], name), f"{name} in: {shown}"
        for word in rest:
            if re.fullmatch(r"(recipes|launch|benchmarks)/\w+\.\w+", word):
                assert (ROOT / word).exists(), shown


@SETTLED_PAGE
def test_settings_named_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    kinds = set(SETTINGS.values())
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)=[^`]*`", text):
        assert any(is_setting(kind, key) for kind in kinds), key


@over([page for page in SETTLED_PAGES if "import " in page.read_text(encoding="utf-8")])
def test_python_imports_what_is_there(page: Path):
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^\s*(?:from|import) .*", "\n".join(python_blocks(text)), re.MULTILINE):
        exec(line.strip(), {})
    for code in re.findall(r"`((?:from [\w.]+ )?import [\w., ]+)[;`]", without_blocks(text)):
        exec(code, {})


def test_recipes_tell_of_files_that_exist():
    for recipe in sorted(ROOT.glob("recipes/*.yaml")):
        head = re.findall("^#.*", recipe.read_text(encoding="utf-8"), re.MULTILINE)
        for name in re.findall(rf"\b(?:{FOLDERS})/[\w/-]+\.(?:py|md|yaml)\b", "\n".join(head)):
            assert (ROOT / name).exists(), f"{name} in {recipe.name}"


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "", without_blocks(text))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = without_blocks(page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command: in shell blocks, indented lines and inline code.

    Variables that the page sets are put in; a command that leaves something out ends there.
    """
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    outside = without_blocks(text)
    blocks += re.findall(r"(?:^ {4,}.*\n?)+", outside, re.MULTILINE)
    blocks += re.findall(r"`((?:drafttrain|python|accelerate) [^`]*)`", outside)
    variables: dict[str, str] = {}
    for block in blocks:
        for line in logical_lines(block):
            for name, value in variables.items():
                line = re.sub(rf"\${name}\b", value, line)
            words = shlex.split(line, comments=True)
            while words and (set_ := re.fullmatch(r"([A-Z_0-9]+)=(.*)", words[0], re.DOTALL)):
                variables[set_[1]] = set_[2]
                words = words[1:]
            if words and "..." in words:
                words = words[: words.index("...")]
            if words:
                yield words


def logical_lines(block: str) -> Iterator[str]:
    """Lines, with those joined that end in a backslash or inside a quotation."""
    line = ""
    for part in block.replace("\\\n", " ").splitlines():
        line = f"{line} {part.strip()}" if line else part.strip()
        try:
            shlex.split(line, comments=True)
        except ValueError:
            continue
        yield line
        line = ""


def called(words: list[str]) -> tuple[str | None, list[str]]:
    """The verb of drafttrain or the script that a command runs, and the words behind it."""
    if words[:2] == ["drafttrain", "train"] and len(words) > 2:
        file = find_recipe(words[2])
        script = script_of(file) if file.suffix == ".yaml" else file
        return f"recipes/{script.name}", words[3:]
    if words[0] == "drafttrain" and len(words) > 1:
        return words[1], words[2:]
    if "drafttrain.cli" in words:
        place = words.index("drafttrain.cli") + 1
        return words[place], words[place + 1 :]
    for place, word in enumerate(words):
        if word == "-m" and words[place + 1].startswith("benchmarks."):
            return words[place + 1].replace(".", "/") + ".py", words[place + 2 :]
        if re.fullmatch(r"(recipes|benchmarks)/\w+\.py", word) and words[0] != "sbatch":
            assert (ROOT / word).exists(), " ".join(words)
            return word, words[place + 1 :]
    return None, []


def known_options(subject: str) -> dict[str, bool]:
    """Options of a verb, of a recipe, or those that a script's source names; whether the word
    behind one is its value (not told for scripts)."""
    if subject.startswith("recipes/"):
        return {"--config": True, "--dry-run": False, "--debug": False}
    if subject.startswith("benchmarks/"):
        source = (ROOT / subject).read_text(encoding="utf-8")
        return dict.fromkeys(re.findall(r'"(--[a-z-]+)"', source), False)
    program = typer.main.get_command(cli.app)
    assert subject in program.commands, f"no command: drafttrain {subject}"
    options = [one for one in program.commands[subject].params if one.param_type_name == "option"]
    return {name: not one.is_flag for one in options for name in one.opts} | {"--help": False}


def is_setting(kind: type[Config], name: str) -> bool:
    """Whether a dotted name is a setting of the class, or an entry of one that is a mapping."""
    fields = fields_of(kind)
    for group, inside in GROUPS.items():
        if group in fields:
            fields |= {f"{group}.{below}": field for below, field in fields_of(inside).items()}
    known = {re.sub(r"\bNAME\b", r"[^.]+", re.escape(one)): fields[one] for one in fields}
    known |= {rf"{one}\.[^.]+": f for one, f in known.items() if get_origin(f.annotation) is dict}
    return any(re.fullmatch(one, name) for one in known)
