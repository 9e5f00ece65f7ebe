"""What the documents name exists: links, files, commands, their settings, imports, JSON fields."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from itertools import pairwise, takewhile
from pathlib import Path
from typing import get_origin

import pytest
import typer

from drafttrain import cli
from drafttrain.commands import options
from drafttrain.commands.train import find_recipe, run_recipe, script_of
from drafttrain.config import commands as verbs
from drafttrain.config import recipes
from drafttrain.config.base import Config, fields_of
from drafttrain.config.policy import Policy
from drafttrain.config.reading import check_settings, load_settings, merge_values
from drafttrain.data.shards.outputs import Counts, Manifest
from drafttrain.evaluation import report
from drafttrain.evaluation.calibration import HeadFacts, OracleCounts
from drafttrain.evaluation.metrics import CallCosts, PositionRates
from drafttrain.evaluation.prompts import Skipped

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("[!.]*/README.md")),
]


def is_config(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, Config)


def over(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


PAGE = over(PAGES)
SETTLED_PAGES = [page for page in PAGES if page.name != "extending.md"]
SETTLED_PAGE = over(SETTLED_PAGES)
"""What docs/extending.md adds is no part of the package; tests/test_extending.py runs it."""
FOLDERS = "drafttrain|recipes|benchmarks|docs|launch|tests|data"
KINDS = [one for module in (verbs, recipes) for one in vars(module).values() if is_config(one)]
BENCHMARKS = {
    "benchmarks/opt_tree.py": verbs.EvalConfig,
    "benchmarks/train.py": recipes.SpecDrafterRecipe,
    "benchmarks/tree_experiments.py": verbs.EvalConfig,
}
"""Whose settings a `key=value` of a script is."""
GROUPS = {"distill": verbs.DistillConfig, "cache": verbs.CacheConfig}
"""Groups of a recipe's settings that its own class leaves open."""
GENERATED = ("settings.md", "models.md")
WORDS = {"README.md": 800, "docs/results.md": 2500}
ALL_WORDS = 15_000
"""Most words of pages, and of all that are written by hand."""
OUTPUTS = ("--out", "--report", "--figure", ">")
"""What stands before a file or folder that a command writes."""
JSON_FIELDS: dict[str, tuple[type, ...]] = {
    "report.json": (
        *(report.Report, report.TargetFacts, report.DataFacts, Skipped, report.Environment),
        *(report.Run, PositionRates, report.Parity, report.Difference, CallCosts),
    ),
    "tune.json": (
        *(report.Search, report.Rung, report.Tried, report.Choice, HeadFacts, OracleCounts),
    ),
    "policy.json": (Policy,),
    "manifest.json": (Manifest, Counts),
}
"""What is written into each file, by its heading in docs/evaluate.md."""


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


@pytest.fixture
def settings_alone(monkeypatch):
    """Commands read their settings, and then end."""
    monkeypatch.setattr(options, "load_settings", read_and_leave)
    monkeypatch.setattr(cli, "call", lambda *_: None)


@SETTLED_PAGE
def test_commands_take_their_options_settings_and_files(page: Path, settings_alone, capsys):
    check_commands(page.read_text(encoding="utf-8"), capsys)


@SETTLED_PAGE
def test_commands_on_what_is_here_would_run(page: Path, monkeypatch, capsys):
    """A dry run checks the pairing, reads the inputs and plans; it loads no weights."""
    monkeypatch.chdir(ROOT)
    for words in commands(page.read_text(encoding="utf-8")):
        subject, rest = called(words)
        plans = subject in ("eval", "tune", "distill") or str(subject).startswith("recipes/")
        written = {after for word, after in pairwise(rest) if word in OUTPUTS}
        named = " ".join(word for word in rest if word not in written and word[:4] != "run=")
        files = re.findall(r"(?:checkpoints|data|recipes)/[\w./-]+|\b\w+\.(?:jsonl|yaml)\b", named)
        here = files and all((ROOT / one).exists() for one in files)
        if plans and here and not re.search(r"\b[A-Z][A-Z0-9]{2,}\b", named):
            assert not exit_code(subject, [*rest, "--dry-run"]), capsys.readouterr().err


@pytest.mark.parametrize("verb", typer.main.get_command(cli.app).commands)
def test_examples_of_the_help_are_right(verb: str, settings_alone, capsys):
    examples = typer.main.get_command(cli.app).commands[verb].help.split("Examples:")[1]
    check_commands("\n\n" + examples.replace("\n  ", "\n      "), capsys)


def test_the_example_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    [code] = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    exec(code, {})
    assert capsys.readouterr().out.strip().endswith("tokens per target call")


@PAGE
def test_commands_write_only_what_git_ignores(page: Path):
    patterns = re.findall(r"^/(\*\..+)$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    blocks = re.findall(r"```(?:bash|sh)\n.*?```", page.read_text(encoding="utf-8"), re.DOTALL)
    for words in commands("\n".join(blocks)):
        places = [after for word, after in pairwise(words) if word in OUTPUTS]
        places += [word.removeprefix("run=") for word in words if word.startswith("run=")]
        for place in places:
            ignored = "/" not in place and any(fnmatch(place, pattern) for pattern in patterns)
            assert ignored or place.startswith("checkpoints/"), " ".join(words)


@pytest.mark.parametrize("heading", JSON_FIELDS)
def test_all_fields_of_a_file_are_documented(heading: str):
    page = (ROOT / "docs/evaluate.md").read_text(encoding="utf-8")
    section = page.split(f"### {heading}\n")[1].split("\n#")[0]
    named = set(re.findall(r"`([\w.]+)`", section))
    for kind in JSON_FIELDS[heading]:
        own = {one.name for one in fields(kind)} if is_dataclass(kind) else set(kind.model_fields)
        assert own <= named, f"{kind.__name__}: {sorted(own - named)}"


def test_pages_stay_short():
    words = {page: len(re.findall(r"\S*\w\S*", page.read_text("utf-8"))) for page in PAGES}
    for name, most in WORDS.items():
        assert words[ROOT / name] <= most, name
    assert sum(words[page] for page in PAGES if page.name not in GENERATED) <= ALL_WORDS


@SETTLED_PAGE
def test_settings_named_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)=[^`]*`", text):
        assert any(is_setting(kind, key) for kind in KINDS), key


@over([page for page in SETTLED_PAGES if "import " in page.read_text(encoding="utf-8")])
def test_python_imports_what_is_there(page: Path):
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^\s*(?:from|import) .*", "\n".join(python_blocks(text)), re.MULTILINE):
        exec(line.strip(), {})
    for code in re.findall(r"`((?:from [\w.]+ )?import [\w., ]+)[;`]", without_blocks(text)):
        exec(code, {})


RECIPES = sorted(ROOT.glob("recipes/*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_the_head_of_a_recipe_names_files_and_commands_that_exist(recipe, settings_alone, capsys):
    head = "\n".join(re.findall("^#.*", recipe.read_text(encoding="utf-8"), re.MULTILINE))
    for name in re.findall(rf"\b(?:{FOLDERS})/[\w/-]+\.(?:py|md|yaml)\b", head):
        assert (ROOT / name).exists(), name
    check_commands(re.sub("^#", "  ", head, flags=re.MULTILINE), capsys)


def read_and_leave(kind, file=None, overrides=(), flags=None, fill=None) -> None:
    """Reads settings as a command does, without what runs would fill in; then ends it."""
    check_settings(kind, merge_values(file, overrides, flags))
    if fill is None:
        load_settings(kind, file, overrides, flags)
    raise SystemExit(0)


def exit_code(subject: str, words: list[str]) -> int | None:
    with pytest.raises(SystemExit) as end:
        if subject.startswith("recipes/"):
            run_recipe(subject, words)
        else:
            cli.main([subject, *words])
    return end.value.code


def check_commands(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(text):
        shown = " ".join(words)
        for word in words:
            if re.fullmatch(r"(recipes|launch|benchmarks)/\w+\.\w+", word):
                assert (ROOT / word).exists(), shown
        subject, rest = called(words)
        if subject is None:
            continue
        rest = list(takewhile(lambda word: word not in ("<", ">"), rest))
        if subject.startswith("benchmarks/"):
            check_names(subject, rest, shown)
        elif rest and not any(word.endswith(".yaml") and "/" not in word for word in rest):
            assert not exit_code(subject, rest), f"{capsys.readouterr().err} in: {shown}"
        elif not subject.startswith("recipes/"):
            assert subject in typer.main.get_command(cli.app).commands, shown


def check_names(script: str, words: list[str], shown: str) -> None:
    """The options of a benchmark are in its source, its settings are `eval`'s."""
    known = re.findall(r'"(--[a-z-]+)"', (ROOT / script).read_text(encoding="utf-8"))
    for word in words:
        name = word.partition("=")[0]
        if re.match(r"--[a-z]", word):
            assert name in known, f"{name} in: {shown}"
        elif script in BENCHMARKS and re.match(r"[a-z][a-z_]*(\.[\w-]+)*=", word):
            assert is_setting(BENCHMARKS[script], name), f"{name} in: {shown}"


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
            words = shlex.split(line.removeprefix("export "), comments=True)
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
        if file.suffix == ".yaml":
            return f"recipes/{script_of(file).name}", ["--config", str(file), *words[3:]]
        return f"recipes/{file.name}", words[3:]
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


def is_setting(kind: type[Config], name: str) -> bool:
    """Whether a dotted name is a setting of the class, or an entry of one that is a mapping."""
    fields = fields_of(kind)
    for group, inside in GROUPS.items():
        if group in fields:
            fields |= {f"{group}.{below}": field for below, field in fields_of(inside).items()}
    known = {re.sub(r"\bNAME\b", r"[^.]+", re.escape(one)): fields[one] for one in fields}
    known |= {rf"{one}\.[^.]+": f for one, f in known.items() if get_origin(f.annotation) is dict}
    return any(re.fullmatch(one, name) for one in known)
