"""Draws SpecDec++'s Figure 4 from reports of `drafttrain eval`: what stop policies cost.

    python benchmarks/draft_costs.py REPORT.json REPORT.json --oracle 0.18,0.58 --figure figure.png

A panel per report: discarded draft tokens against target calls, a point per method, in the order
of the report. Lower and further left is better. --oracle gives for each report the target calls of
drafts that end right before the first rejection (Lemma 2.1; `follow_oracle` counts them).
"""

import argparse
import re
from pathlib import Path

from drafttrain.evaluation.plots import draw_head, style
from drafttrain.evaluation.report import Report

from matplotlib.figure import Figure

Rates = dict[str, tuple[float, float]]


def rates(report: Report) -> Rates:
    """Returns target calls and discarded draft tokens per output token of each drafting method."""
    found = {}
    for run in report.runs:
        if run.totals.get("drafted"):
            fixed = re.search(r"k=\d+", run.name)
            costs = run.totals["rounds"], run.totals["discarded"]
            calls, discarded = (cost / run.totals["tokens"] for cost in costs)
            found[fixed[0] if fixed else run.name] = calls, discarded
    return found


def draw(panels: list[tuple[str, Rates, float | None]]) -> Figure:
    figure = Figure(figsize=(4.6 * len(panels), 4.6), layout="constrained", dpi=110)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    looks: dict[str, int] = {}  # the same method looks the same in all panels, with any h
    for axis, (title, points, oracle) in zip(axes, panels, strict=True):
        for name, point in points.items():
            look = style(looks.setdefault(name.partition(" h ")[0], len(looks)))
            axis.plot(*point, linestyle="", markersize=9, label=name, **look)
        if oracle is not None:
            axis.plot(oracle, 0.0, "k*", markersize=14, clip_on=False, label="oracle")
        axis.set(xlabel="target calls per output token", ylabel="discarded tokens per output token")
        axis.set_ylim(bottom=0.0)
        axis.margins(0.1)
        draw_head(axis, title, 2)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", type=Path, nargs="+", help="report.json of `drafttrain eval`")
    parser.add_argument("--titles", default="", help="of the panels, separated by commas")
    parser.add_argument("--oracle", default="", help="target calls per token, one per report")
    parser.add_argument("--figure", type=Path, default=Path("figure_4.png"), help="PNG to write")
    given = parser.parse_args()
    titles = given.titles.split(",") if given.titles else [one.stem for one in given.reports]
    oracles = [float(one) for one in given.oracle.split(",") if one] or [None] * len(titles)
    if not len(titles) == len(oracles) == len(given.reports):
        parser.error(f"--titles and --oracle: give {len(given.reports)} each, one per report")
    if missing := [str(one) for one in given.reports if not one.is_file()]:
        parser.error(f"no report {missing[0]!r}; give report.json files of `drafttrain eval`")
    reports = [Report.model_validate_json(one.read_text()) for one in given.reports]
    draw([*zip(titles, map(rates, reports), oracles, strict=True)]).savefig(given.figure)
    print(f"Wrote {given.figure}")


if __name__ == "__main__":
    main()
