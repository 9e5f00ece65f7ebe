"""Write the tables of docs/results.md from the reports in benchmarks/results/.

    python -m benchmarks.results           # `make results` measures first (launch/results.sh)
    python -m benchmarks.results --check   # exit code 1 if the page differs

Each table of the page is between `<!-- NAME -->` and `<!-- end -->`. It shows the command, machine,
commit, date and runs of `benchmarks/results/NAME.json`, a `report.json` of `drafttrain eval`. Text
outside these marks is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from drafttrain.config.base import counted
from drafttrain.data.shards.writing import write_file
from drafttrain.evaluation.report import Report, read_report
from drafttrain.evaluation.tables import METRICS, Column, Table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
REPORTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- (?P<name>[\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
SHOWN = {
    "mean_acceptance_length": "mean acceptance length",
    "swi": "SWI",
    "bleu_difference": "Δ BLEU to plain",
    "speedup": "over plain",
    "speedup_vs_fixed": "over the best fixed k",
    "speedup_vs_generate": "over `generate`",
    "speedup_vs_beam": "over beam search",
    "identical": "identical %",
}
"""Metrics of the page's tables, and their column titles."""


def render(report: Report, name: str) -> str:
    """Renders the block of a report: command, machine, table."""
    measured = report.environment
    cpu = re.sub(r"\((R|TM)\)|Processor|\d+-Core", "", measured.cpu)
    machine = report.target.device if measured.gpu is None else measured.gpu
    facts = [
        " ".join(cpu.split()) if machine == "cpu" else machine,
        counted(measured.threads, "thread"),
        f"{report.target.dtype}, {counted(report.data.prompts, 'input')}",
        measured.date[:10],
    ]
    if measured.commit is not None:
        facts.insert(-1, f"revision {measured.commit}")
    columns = [Column("method", lambda run: f"{run.name} **(lossy)**" if run.lossy else run.name)]
    if len(report.batch_sizes) > 1:
        columns.append(Column("batch size", lambda run: run.batch_size))
    lossy = any(run.lossy for run in report.runs)
    cascades = any(run.method == "cascade" for run in report.runs)
    for metric, title in SHOWN.items():
        if (metric != "bleu_difference" or lossy) and (metric != "swi" or cascades):
            column = METRICS[metric]
            columns.append(Column(title, column.of, column.digits, column.percent, column.suffix))
    used = [one for one in columns if any(one.of(run) is not None for run in report.runs)]
    table = Table(name, used, report.runs).markdown()
    return f"    {measured.command}\n\n{'; '.join(facts)}.\n\n{table}"


def render_page(text: str) -> str:
    """Renders the page with the tables of all reports.

    Raises ValueError for a missing or damaged report.
    """

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        content = render(read_report(REPORTS / f"{name}.json"), name)
        return f"<!-- {name} -->\n{content}<!-- end -->"

    return BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    given = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = render_page(before)
    if given.check:
        sys.exit(after != before)
    write_file(PAGE, after)


if __name__ == "__main__":
    main()
