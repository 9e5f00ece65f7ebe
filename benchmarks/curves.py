"""How runs learn: a measure of their held-out inputs by steps, in one picture.

    python -m benchmarks.curves "29,000 inputs=checkpoints/a" "145,000 inputs=checkpoints/b" \\
        --out curves.png

Each is a name and the folder of a run; its metrics.jsonl is read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

from drafttrain.data.shards.writing import renamed_when_whole
from drafttrain.evaluation.plot_style import COLOURS, draw_legend


def read_curve(run: Path, measure: str) -> list[dict[str, float]]:
    """The rows of a run that have the measure. Raises ValueError where there are none."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{run} has no metrics.jsonl; give the folder of a run")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    found = [row for row in rows if measure in row]
    if not found:
        measures = sorted({name for row in rows for name in row})
        raise ValueError(f"{file} has no {measure!r}; it has {', '.join(measures)}")
    return found


def draw_curves(runs: dict[str, Path], measure: str) -> Figure:
    """A line a run."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axis = figure.subplots()
    for index, (name, run) in enumerate(runs.items()):
        rows = read_curve(run, measure)
        steps, values = [row["step"] for row in rows], [row[measure] for row in rows]
        colour = COLOURS[index % len(COLOURS)]
        axis.plot(steps, values, marker="o", markersize=3, color=colour, label=name)
    axis.set_xlabel("steps")
    axis.set_ylabel(measure.replace("_", " "))
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    draw_legend(axis)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER", help="a name and a run's folder")
    parser.add_argument("--measure", default="mean_acceptance_length", help="field of the rows")
    parser.add_argument("--out", type=Path, default=Path("curves.png"), help="picture to write")
    given = parser.parse_args()
    runs: dict[str, Path] = {}
    for run in given.runs:
        name, equals, folder = run.partition("=")
        if not equals:
            parser.error(f"{run!r} is not NAME=FOLDER, as in 'long=checkpoints/long'")
        runs[name] = Path(folder)
    try:
        figure = draw_curves(runs, given.measure)
    except ValueError as error:
        parser.error(str(error))
    with renamed_when_whole(given.out) as temporary:
        figure.savefig(temporary, format=given.out.suffix.lstrip(".") or "png", dpi=130)
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
