"""What `drafttrain tune` shows of its search: findings, the heads' table, the page, panels."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from drafttrain.evaluation.page import Card, Page, PageTable
from drafttrain.evaluation.plot_style import COLOURS, GREY, draw_bars, draw_legend
from drafttrain.evaluation.report import Choice, Report, Run, Search, Tried
from drafttrain.evaluation.table_style import (
    Column,
    add_metrics,
    metric_cells,
    new_table,
    plain_cell,
)
from drafttrain.evaluation.tables import machine_note, main_columns

SPEED = Column("tokens_per_second", "tokens/s", digits=0)
CALIBRATION = (
    Column("binary_kl", "KL", digits=3),
    Column("ece", "ECE", digits=3),
    Column("auc", "AUC", digits=3),
    Column("label_mean", "acceptance", digits=3),
    Column("predicted_mean", "predicted", digits=3),
)


def last_standings(search: Search, batch_size: int) -> dict[str, Tried]:
    """Every candidate in the last rung that it decoded, who stayed longest and is fastest first."""
    found: dict[str, Tried] = {}
    for rung in reversed(search.rungs):
        if rung.batch_size == batch_size:
            found |= {name: one for name, one in rung.candidates.items() if name not in found}
    return found


def verdict_lines(report: Report) -> list[str]:
    """What was chosen and what it is worth on the final prompts, a sentence each."""
    search = searched(report)
    lines = []
    for choice in search.choices:
        best, size = result_of(report, choice.best, choice.batch_size), choice.batch_size
        words = f"batch size {size}: {choice.best}"
        if choice.best == "plain":
            lines.append(f"{words}; no draft is faster than plain decoding")
            continue
        lines.append(f"{words}, {_times(best['speedup'])} plain decoding")
        for name in dict.fromkeys((choice.best_fixed, choice.best_head)):
            if name not in (None, choice.best):
                other = result_of(report, name, size)
                lines.append(f"  {name}: {_times(other['speedup'])}")
    lines += settings_lines(report)
    tried = ", ".join(f"{rung.prompts}" for rung in search.rungs)
    lines.append(
        f"{1 + len(search.candidates)} candidates, compared after {tried} prompts of "
        f"{search.data.path}; the figures are of {report.data.prompts} other prompts; "
        f"{search.minutes:.1f} minutes"
    )
    lines.append(
        f"a draft token takes {1000 * search.t_draft:.2f} ms, a target call "
        f"{1000 * search.t_target:.2f} ms"
        + (f"; h by Theorem 3.1: {search.threshold:.3f}" if search.threshold else "")
    )
    if search.oracle is not None:
        oracle = search.oracle
        lines.append(
            f"the oracle (SpecDec++ Lemma 2.1) discards nothing and makes "
            f"{oracle.target_calls / oracle.tokens:.2f} target calls per token"
        )
    return lines


def settings_lines(report: Report) -> list[str]:
    """Draft lengths for serving engines, which draft chains of fixed length; none for drafters that
    engines cannot load."""
    search = searched(report)
    fixed = [(choice.batch_size, choice) for choice in search.choices if choice.best_fixed]
    if not fixed or report.run(str(fixed[0][1].best_fixed)).drafter != "causal":
        return []
    lengths = [(size, served_length(report, choice)) for size, choice in fixed]
    shown = ", ".join(f"{k} at batch size {size}" for size, k in lengths)
    return [f"vLLM num_speculative_tokens, llama.cpp --spec-draft-n-max: {shown}"]


def served_length(report: Report, choice: Choice) -> int:
    """The best fixed draft length, 0 where plain decoding is faster on the final prompts."""
    result = result_of(report, str(choice.best_fixed), choice.batch_size)
    run = report.run(str(choice.best_fixed))
    return int(run.settings["k"]) if result["speedup"].value > 1.0 else 0


def head_table(report: Report) -> Table | None:
    """Calibration of every head on held-out draft tokens; None without heads."""
    heads = searched(report).heads
    if not heads:
        return None
    table = new_table("Acceptance heads on held-out draft tokens")
    table.add_column("head", no_wrap=True)
    add_metrics(table, CALIBRATION)
    for head in heads:
        table.add_row(head.name, *metric_cells(head, CALIBRATION, True))
    return table


def tune_page(report: Report, plot: bytes) -> Page:
    """The page: the choice at each batch size, the final figures, the plot, all candidates."""
    search = searched(report)
    columns = main_columns(report)
    final = PageTable(
        f"Final figures on {report.data.prompts} prompts of {report.data.path}",
        ["method", *(column.title for column in columns)],
        [[run.name, *(plain_cell(run, column, True) for column in columns)] for run in report.runs],
        search.choices[0].best,
    )
    tables = [final, *(_standings(search, choice) for choice in search.choices)]
    if search.heads:
        rows = [[h.name, *(plain_cell(h, one, True) for one in CALIBRATION)] for h in search.heads]
        titles = ["head", *(column.title for column in CALIBRATION)]
        tables.append(PageTable("Acceptance heads on held-out draft tokens", titles, rows))
    return Page(
        title=f"{report.target.path} with {search.drafter}",
        subtitle=f"Candidates decoded on {search.data.path}; {machine_note(report, True)}",
        tables=tables,
        plot=plot,
        plot_text="Speed of the candidates, discarded tokens against target calls per token",
        cards=[_card(report, choice) for choice in search.choices],
        verdicts=verdict_lines(report),
        notes=[
            "A rung decodes new prompts with the candidates left, interleaved; then the slower "
            "half leaves. Speed against the fastest is paired by prompt."
        ],
    )


def _card(report: Report, choice: Choice) -> Card:
    best = result_of(report, choice.best, choice.batch_size)
    speed = best["tokens_per_second"].value
    detail = f"{speed:,.0f} tokens/s, {_times(best['speedup'])} plain decoding"
    return Card(f"batch size {choice.batch_size}", choice.best, detail)


def _standings(search: Search, choice: Choice) -> PageTable:
    size = choice.batch_size
    prompts: dict[str, int] = {}
    for rung in search.rungs:
        if rung.batch_size == size:
            prompts |= dict.fromkeys(rung.candidates, rung.prompts)
    rows = []
    for name, one in last_standings(search, size).items():
        against = one.against_best
        ratio = f"{against.value:.3f} ({against.low:.3f}–{against.high:.3f})"
        rates = [f"{one.verification_rate:.3f}", f"{one.discard_rate:.3f}"]
        speed = f"{one.tokens_per_second.value:,.0f}"
        rows.append([name, str(prompts[name]), speed, ratio, *rates])
    titles = ["candidate", "prompts", SPEED.title, "against the fastest"]
    titles += ["target calls per token", "discarded per token"]
    return PageTable(f"Candidates at batch size {size}", titles, rows, choice.best)


def draw_search(figure: Figure, report: Report) -> None:
    """Draws speed of all candidates, Figure 4 of SpecDec++, and the reliability of heads."""
    heads = bool(searched(report).heads)
    grid = figure.add_gridspec(2 if heads else 1, 2)
    speed_panel(figure.add_subplot(grid[:, 0]), report)
    rates_panel(figure.add_subplot(grid[0, 1]), report)
    if heads:
        reliability_panel(figure.add_subplot(grid[1, 1]), report)


def speed_panel(axis: Axes, report: Report) -> None:
    """Tokens per second of every candidate at batch size 1, in its last rung."""
    search = searched(report)
    standings = last_standings(search, 1)
    names = list(standings)
    colours = [COLOURS[0] if name == search.choices[0].best else "#C4C4C4" for name in names]
    draw_bars(axis, names, [one.tokens_per_second for one in standings.values()], colours)
    axis.tick_params(axis="y", labelsize=6.5)
    axis.set(title="Candidates, batch size 1", xlabel="tokens per second, last rung decoded")


def rates_panel(axis: Axes, report: Report) -> None:
    """Discard rate against verification rate of chains (SpecDec++ Figure 4), and the oracle."""
    search = searched(report)
    standings = last_standings(search, 1)
    chains = [n for n, own in search.candidates.items() if not {"tree", "cascade"} & own.keys()]
    for colour, (group, names) in zip(COLOURS, _groups(chains).items(), strict=False):
        points = sorted((standings[n].verification_rate, standings[n].discard_rate) for n in names)
        axis.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1, label=group)
    if search.oracle is not None:
        rate = search.oracle.target_calls / search.oracle.tokens
        axis.plot(rate, 0.0, "*", color="#B8A800", markersize=13, label="oracle")
    axis.set(
        title="Cost of drafts", xlabel="target calls per token", ylabel="discarded tokens per token"
    )
    axis.set_ylim(bottom=0.0)
    draw_legend(axis)


def reliability_panel(axis: Axes, report: Report) -> None:
    """Predicted against observed acceptance of the heads; the area of a point is its positions."""
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for colour, head in zip(COLOURS, searched(report).heads[:4], strict=False):
        bins = head.reliability
        sizes = [8 + 70 * count / max(bins.positions) for count in bins.positions]
        axis.plot(bins.predicted, bins.observed, "-", color=colour, linewidth=1.2)
        axis.scatter(bins.predicted, bins.observed, s=sizes, color=colour, label=head.name)
    axis.set(
        title="Reliability of acceptance heads", xlabel="predicted acceptance", ylabel="acceptance",
        xlim=(0, 1), ylim=(0, 1),
    )  # fmt: skip
    draw_legend(axis, place="upper left")


def _groups(names: Sequence[str]) -> dict[str, list[str]]:
    """Candidates by what they have in common before their value: k=4 block and k=2 block."""
    groups: dict[str, list[str]] = {}
    for name in names:
        first, _, rule = name.partition(" ")
        stem = first.split("=")[0].split("(")[0]
        rule = rule.split("h=")[-1].partition(" ")[2] if rule.startswith("h=") else rule
        groups.setdefault(f"{stem} {rule}".strip(), []).append(name)
    return groups


def searched(report: Report) -> Search:
    """How tune chose. Raises ValueError for a report of `eval`."""
    if report.search is None:
        raise ValueError("the report is of `drafttrain eval`; give one of `drafttrain tune`")
    return report.search


def result_of(report: Report, name: str, batch_size: int) -> dict:
    """Metrics of a run at a batch size."""
    run: Run = report.run(name)
    found = {one.batch_size: one.metrics for one in run.batches}
    return found.get(batch_size, run.metrics)


def _times(estimate) -> str:
    return f"{estimate.value:.2f}× ({estimate.low:.2f}–{estimate.high:.2f})"
