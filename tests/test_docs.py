"""Links, files, settings, imports and JSON fields that documents name exist."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_origin

import pytest

from drafttrain.config import commands as verbs
from drafttrain.config import recipes
from drafttrain.config.base import Config, fields_of
from drafttrain.config.policy import Policy
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
"""Pages with existing settings; docs/extending.md adds new ones (see tests/test_extending.py)."""
FOLDERS = "drafttrain|recipes|benchmarks|docs|launch|tests|data"
KINDS = [one for module in (verbs, recipes) for one in vars(module).values() if is_config(one)]
GROUPS = {"distill": verbs.DistillConfig, "cache": verbs.CacheConfig}
"""Groups of recipe settings whose fields the recipe's class does not define."""
GENERATED = ("settings.md", "models.md")
WORDS = {"README.md": 800, "docs/results.md": 2000}
ALL_WORDS = 15_000
"""Maximal number of words of pages, and of all hand-written documents."""
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
"""The contents of each file, by its heading in docs/evaluate.md."""


@PAGE
def test_links_lead_somewhere(page):
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
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    text = without_blocks(page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, line, *rows = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert {line, *rows} == {head}, table.splitlines()[0]


@PAGE
def test_files_named_exist(page):
    text = without_blocks(page.read_text(encoding="utf-8"))
    for name in re.findall(rf"`((?:{FOLDERS})(?:/[\w.-]+)+)/?`", text):
        assert (ROOT / name).exists(), name
    if page.parent.name in ("benchmarks", "launch"):
        for name in re.findall(r"`([\w-]+\.(?:py|sh|yaml))`", text):
            assert (page.parent / name).exists(), name


@pytest.mark.parametrize("heading", JSON_FIELDS)
def test_all_fields_of_a_file_are_documented(heading):
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
def test_settings_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)=[^`]*`", text):
        assert any(is_setting(kind, key) for kind in KINDS), key


@over([page for page in SETTLED_PAGES if "import " in page.read_text(encoding="utf-8")])
def test_documented_imports_exist(page):
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^\s*(?:from|import) .*", "\n".join(python_blocks(text)), re.MULTILINE):
        exec(line.strip(), {})
    for code in re.findall(r"`((?:from [\w.]+ )?import [\w., ]+)[;`]", without_blocks(text)):
        exec(code, {})


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def without_blocks(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", "", without_blocks(text))


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    text = without_blocks(page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_setting(kind: type[Config], name: str) -> bool:
    """Returns whether a dotted name is a setting of the class, or an entry of a mapping setting."""
    fields = fields_of(kind)
    for group, inside in GROUPS.items():
        if group in fields:
            fields |= {f"{group}.{below}": field for below, field in fields_of(inside).items()}
    known = {re.sub(r"\bNAME\b", r"[^.]+", re.escape(one)): fields[one] for one in fields}
    known |= {rf"{one}\.[^.]+": f for one, f in known.items() if get_origin(f.annotation) is dict}
    return any(re.fullmatch(one, name) for one in known)
