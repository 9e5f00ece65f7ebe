"""The table and the plot of a report with hand-written figures."""

from itertools import product

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from drafttrain.build.drafts import shortened
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.calibration import HeadFacts, Reliability
from drafttrain.evaluation.plots import (
    choose_plot,
    draw_curves,
    lines,
    plot_report,
    rates_panel,
    reliability_panel,
)
from drafttrain.evaluation.report import Parity, Report, Rung, Search
from drafttrain.evaluation.tables import METRICS, main_table, parity_lines, winners
from tests.evaluation.reports import batch_run, batched_report, estimate, run, tried


@pytest.fixture(scope="module")
def report() -> Report:
    return batched_report()


def with_runs(report: Report, *runs) -> Report:
    return report.model_copy(update={"runs": [report.runs[0], *runs]})


def method(name: str, speedup: float, drafted: int = 30, **changes: object):
    """Returns a run at batch size 1, with optional settings and metrics."""
    facts = {"kind": "method", "method": "chain", "drafter": "causal"}
    facts["totals"] = {"prompts": 40, "drafted": drafted, "rounds": 10}
    facts["metrics"] = {"speedup": estimate(speedup), "mean_acceptance_length": estimate(2.0)}
    return run(name, **facts | changes)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_method_has_a_row_at_each_of_its_batch_sizes(report):
    header, _, *rows = main_table(report).markdown(intervals=False).splitlines()
    titles, *rows = map(cells_of, (header, *rows))
    cells = [dict(zip(titles, row, strict=True)) for row in rows]
    methods = [("plain", "–"), ("causal k=3 greedy", "3"), ("causal k=9 greedy", "9")]
    assert [(one["method"], one["k"]) for one in cells] == [*methods, ("assisted", "–"), *methods]
    assert [one["batch"] for one in cells] == ["1"] * 4 + ["8"] * 3
    plain = cells[4]
    assert (plain["ms per token"], plain["tok/s"], plain["speedup"]) == ("18.00", "400", "1.00×")
    assert (plain["equal %"], plain["memory, MB"]) == ("95.0", "20.0")
    assert "1.20× (1.08–1.32×)" in main_table(report).markdown()


def test_the_fastest_at_each_batch_size_may_be_another(report):
    fastest = {size: best.name for size, best in winners(report).items()}
    assert fastest == {1: "causal k=9 greedy", 8: "causal k=3 greedy"}
    slow = with_runs(report, report.runs[4], batch_run("causal k=3 greedy", 8, (90, 30, 0.9), k=3))
    assert winners(slow)[8].name == "plain"


def test_sizes_of_trees_settings_of_rules_and_lossy_marks_are_columns(report):
    tree = method("opt-tree(16) greedy", 1.2, method="opt-tree", sizes={"depth": 5, "nodes": 16})
    settings = {"k": 5.0, "beta": 3.0, "tau": 1.0}
    name = "causal k=5 spec-verification(3,1.0)"
    lossy = method(name, 1.4, settings=settings, lossless=False)
    table = main_table(with_runs(report, tree, lossy)).markdown(intervals=False).splitlines()
    columns = ["k", "beta", "tau", "levels", "nodes"]
    assert [title for title in cells_of(table[0]) if title in columns] == columns
    assert "16" in table[3] and "(lossy)" in table[4] and "(lossy)" not in table[3]


def test_reasons_for_differences_in_a_batch_are_stated_and_errors_stand_out(report):
    parts = [{"row": row, "position": 3, "gap": gap} for row, gap in enumerate((2e-7, 4e-2, 5e-2))]

    def line_of(identical: int, differences: list) -> str:
        values = {"against": "batch size 1", "compared": 40, "bound": 1e-5}
        parity = Parity(**values, identical=identical, differences=differences)
        run = batch_run("plain", 8, (400, 18, 1.0), parity=[parity])
        [line] = parity_lines(with_runs(report, run))
        return line

    assert line_of(39, parts[:1]) == (
        "plain, batch 8: 39 of 40 equal to batch size 1; at the first difference the top-2 "
        "logit gap is 2.0e-07 to 2.0e-07 (ties, bound 1e-05)"
    )
    assert "(2 are NOT ties: please report" in line_of(37, parts)


def test_the_x_axis_of_the_plot_is_what_was_varied(report):
    sizes = choose_plot(report)
    assert sizes.xlabel == "batch size" and sizes.logarithmic
    swept = [method(f"causal k={k} greedy", 1 + k / 10, 10 * k, settings={"k": k}) for k in (2, 4)]
    plot = choose_plot(with_runs(report, *swept))
    assert plot.xlabel == "draft tokens per round" and plot.curves[0].xs == [2.0, 4.0]
    assert not plot.logarithmic
    metrics = {"speedup": estimate(1.5), "bleu_difference": Estimate(-0.5, -1.0, 0.0)}
    settings = {"k": 4, "beta": 3, "tau": 1.0}
    lossy = method("lossy", 1.5, settings=settings, lossless=False, metrics=metrics)
    assert "BLEU" in choose_plot(with_runs(report, *swept, lossy)).xlabel
    single = choose_plot(with_runs(report, swept[0]))
    assert len(single.curves) == 1 and single.levels == {"plain": 1.0}
    assert plot_report(report).startswith(b"\x89PNG")


def test_a_line_never_joins_points_of_different_methods():
    chains = [method(f"c{k}", 1.0, settings={"k": k}, stop=f"k={k}") for k in (2, 4)]
    heads = [method(f"h{h}", 1.0, settings={"h": h}, stop=f"head({h})") for h in (0.3, 0.5)]
    block = method("b", 1.0, settings={"k": 4}, verifier="block", stop="k=4")
    trees = [method(f"t{n}", 1, method="opt-tree", sizes={"nodes": n}, stop="k=5") for n in (16, 8)]
    other = method("o", 1.0, settings={"k": 4}, other="second", stop="k=4")
    found = lines([*chains, *heads, block, *trees, other])
    assert [[one.name for one in line] for _, line in found] == [
        ["c2", "c4"], ["h0.3", "h0.5"], ["b"], ["t8", "t16"], ["o"],
    ]  # fmt: skip
    assert len({label for label, _ in found}) == len(found)


def test_reference_lines_that_nearly_coincide_share_a_label(report):
    plot = choose_plot(report)._replace(levels={"plain": 1.0, "beam": 0.6, "generate": 1.01})
    axis = Figure().subplots()
    draw_curves(axis, plot)
    assert [text.get_text() for text in axis.texts][-2:] == ["beam", "plain, generate"]


def test_two_drafters_of_a_kind_are_two_lines_under_the_users_names():
    named = [
        method(f"{name} {k}", 1.0, settings={"k": k}, stop=f"k={k}", called=name)
        for name in ("first", "second")
        for k in (2, 4)
    ]
    alike = method("first k=4", 1.0, settings={"k": 4}, other="first", stop="k=4")
    found = lines([*named, alike])
    assert [label for label, _ in found] == ["first greedy", "second greedy", "first"]
    assert [len(line) for _, line in found] == [2, 2, 1]


def test_long_names_are_shortened_and_stay_distinct():
    names = [f"a-drafter-of-the-year-2026-trained-on-{data}-texts-at-night" for data in "ab"]
    cut = shortened(names)
    assert len({*cut}) == 2 and max(map(len, cut)) < len(names[0])
    assert shortened(["short", names[0]], 24)[0] == "short"
    assert len(shortened([names[0]])[0]) <= 24


def search_of(report: Report, **given: object) -> Search:
    facts = {"drafter": "d", "data": report.data, "rungs": [], "choices": []}
    return Search(**facts | {"minutes": 1.0, "t_draft": 1.0, "t_target": 1.0} | given)


def test_every_swept_stop_is_drawn_and_none_is_joined_to_another(report):
    stops = {f"k={k}": {"stop": {"k": k}} for k in (1, 2, 3)}
    heads = [f"D{depth}-w{weight}" for depth in range(3) for weight in (1, 3, 6)]
    for head, h in product(heads, (0.3, 0.5)):
        stops[f"{head} h={h}"] = {"stop": {"kind": "head", "head": head, "h": h}}
    stops |= {"mine=1": {"stop": {"kind": "entropy", "entropy": 1.0}}, "mine=2": {"stop": {"k": 5}}}
    candidates = dict.fromkeys(stops, tried())
    for k, rate in ((1, 0.6), (2, 0.4), (3, 0.5)):
        candidates[f"k={k}"] = tried(verification_rate=rate)
    rung = Rung(batch_size=1, prompts=1, tokens=1.0, candidates=candidates)
    axis = Figure().subplots()
    rates_panel(axis, search_of(report, candidates=stops, rungs=[rung]))
    assert sorted(len(line.get_xdata()) for line in axis.lines) == [1, 1, *[2] * 9, 3]
    assert list(axis.lines[0].get_xdata()) == [0.6, 0.4, 0.5], "joined by k"
    assert [note.get_text() for note in axis.texts[:3]] == ["1", "2", "3"]
    axis.figure.draw_without_rendering()
    assert axis.get_legend().get_window_extent().y0 >= axis.bbox.y1, "the legend covers no point"


def test_reliability_is_drawn_of_the_heads_that_were_tried(report):
    bins = Reliability(predicted=[0.2, 0.8], observed=[0.1, 0.9], positions=[5, 5])
    facts = {"depth": 0, "metrics": {}, "reliability": bins}
    heads = [HeadFacts(name=name, **facts) for name in ("D0-w1", "D1-w6", "D2-w1")]
    head = {"stop": {"kind": "head", "head": "run/final/D2-w1", "h": 0.5}}
    candidates = {"k=1": {"stop": {"k": 1}}, "D2-w1 h=0.5": head}
    axis = Figure().subplots()
    reliability_panel(axis, search_of(report, candidates=candidates, heads=heads))
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["D2-w1"]


@pytest.mark.parametrize("width", [80, 110, 200])
def test_a_terminal_shows_whole_names_and_figures(report, width):
    names = [f"functions-drafter entropy({n}) greedy" for n in (1, 2)]
    other = {"greedy_match", "sampled_acceptance", "wer", "wer_difference", "rtf"}
    metrics = dict.fromkeys(METRICS.keys() - other, estimate(1.5))
    runs = [method(name, 1.2, metrics=metrics) for name in names]
    console = Console(width=width, record=True)
    console.print(main_table(with_runs(report, *runs)))
    shown = " ".join(console.export_text().split())
    assert "entropy(1)" in shown and "entropy(2)" in shown and "…" not in shown
    assert ("E(A)" in shown) == (width == 200), "a column that the others leave no room for"
    assert ("(1.35–1.65×)" in shown) == (width > 80)
