"""Trees at equal depth and budget: groups, names, the best of each method; table and plot."""

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.plots import choose_panels, plot_report
from drafttrain.evaluation.report import DataFacts, Report, Run, TargetFacts
from drafttrain.evaluation.tables import markdown_trade_off, trade_off_table
from drafttrain.evaluation.trees.comparison import compared_by, method_of, tree_groups, tree_name
from drafttrain.evaluation.trees.tables import markdown_trees, tree_table

ENVIRONMENT = describe_environment("drafttrain eval")
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def run_of(drafter, verifier, depth, nodes, tokens, mbsu=1.0, stop=None, kind="method"):
    stop = stop or f"k={depth}"
    values = {"mean_acceptance_length": tokens, "mbsu": mbsu, "tokens_per_second": 10 * tokens}
    return Run(
        name="plain" if kind == "plain" else f"{drafter} {stop} {verifier}",
        kind=kind,
        drafter=drafter,
        stop=stop,
        verifier=verifier,
        sampling=SAMPLING,
        lossless=True,
        settings={} if depth is None else {"depth": depth, "nodes": nodes},
        metrics={name: Estimate(v, v - 0.1, v + 0.1) for name, v in values.items()},
    )


def report_of(*runs):
    return Report(
        mode="decode",
        target=TargetFacts(path="models/tiny", parameters=10, dtype="float32", device="cpu"),
        data=DataFacts(path="data/tiny.txt", prompts=4, references=0),
        environment=ENVIRONMENT,
        options={},
        runs=[run_of("none", "rejection", None, None, 1.0, kind="plain"), *runs],
    )


BY_DEPTH = report_of(
    run_of("causal", "rejection", 2, 2, 2.0),
    run_of("causal", "rejection", 3, 3, 2.25),
    run_of("paths(2)", "k-seq", 2, 4, 2.5),
    run_of("paths(3)", "k-seq", 2, 6, 2.625, mbsu=0.5),
    run_of("rsd-c(2,2)", "recursive", 2, 6, 2.75),
    run_of("rsd-c(4,1,1)", "recursive", 3, 12, 3.0),
)
BY_BUDGET = report_of(
    run_of("causal", "greedy", 6, 6, 2.0),
    run_of("opt-tree(6)", "greedy", 20, 6, 2.5, stop="gain(0.2,20)"),
    run_of("opt-tree(25)", "greedy", 20, 25, 3.5, stop="gain(0.2,20)"),
    run_of("eagle(25)", "greedy", 5, 25, 3.0),
)
SWEEP = report_of(
    run_of("causal", "greedy", None, None, 2.0, stop="k=4").model_copy(
        update={"settings": {"k": 4.0}}
    )
)


@pytest.mark.parametrize(
    ("drafter", "verifier", "method", "name"),
    [
        ("causal", "rejection", "sd", "sd"),
        ("spec-drafter", "greedy", "sd", "sd"),
        ("paths(3)", "k-seq", "spectr", "spectr(3)"),
        ("paths(3)", "multi-round", "specinfer", "specinfer(3)"),
        ("paths(1)+paths(1)", "multi-round", "specinfer", "specinfer(1+1)"),
        ("paths(3)", "greedy", "paths", "paths(3)"),
        ("rsd-c(2,2,1)", "recursive", "rsd-c", "rsd-c(2,2,1)"),
        ("spec-drafter rsd-s(3)", "recursive", "rsd-s", "rsd-s(3)"),
        ("opt-tree(25)", "target-walk", "opt-tree", "opt-tree(25)"),
        ("opt-tree(25,head)", "target-walk", "opt-tree,head", "opt-tree(25,head)"),
    ],
)
def test_methods_have_their_papers_names(drafter, verifier, method, name):
    run = run_of(drafter, verifier, 2, 6, 2.0)
    assert (method_of(run), tree_name(run)) == (method, name)


def test_trees_are_compared_at_what_they_have_in_common():
    assert compared_by(BY_DEPTH) == "depth"
    assert compared_by(BY_BUDGET) == "nodes"
    assert compared_by(SWEEP) is None
    assert tree_groups(SWEEP) == []


def test_what_a_report_says_it_compares_comes_before_what_its_settings_look_like():
    said = BY_BUDGET.model_copy(update={"runs": BY_BUDGET.runs[:1] + BY_BUDGET.runs[2:4]})
    assert compared_by(said) == "depth"  # both trees have at most 20 levels
    assert compared_by(said.model_copy(update={"compared_by": "nodes"})) == "nodes"


def test_a_sweep_over_delta_is_a_trade_off_though_trees_have_depth_and_nodes():
    runs = [
        run.model_copy(update={"settings": run.settings | {"delta": delta}})
        for run, delta in zip(BY_BUDGET.runs[2:4], (0.1, 0.2), strict=True)
    ]
    swept = report_of(*runs)
    assert compared_by(swept) is None and trade_off_table(swept) is not None
    compared = swept.model_copy(update={"compared_by": "nodes"})
    assert trade_off_table(compared) is None and len(tree_groups(compared)) == 2


def test_groups_hold_every_tree_of_a_depth_method_by_method():
    shuffled = BY_DEPTH.model_copy(update={"runs": [*BY_DEPTH.runs[:3], *BY_DEPTH.runs[:2:-1]]})
    found = [(group.value, [tree_name(r) for r in group.runs]) for group in tree_groups(shuffled)]
    assert found == [
        (2.0, ["sd", "rsd-c(2,2)", "spectr(3)", "spectr(2)"]),
        (3.0, ["sd", "rsd-c(4,1,1)"]),
    ]


def test_the_best_tree_of_a_method_is_found_for_each_metric_alone():
    group = tree_groups(BY_DEPTH)[0]
    narrow, wide = group.runs[1:3]
    assert [tree_name(run) for run in (narrow, wide)] == ["spectr(2)", "spectr(3)"]
    assert [group.best(run, "mean_acceptance_length") for run in (narrow, wide)] == [False, True]
    assert [group.best(run, "mbsu") for run in (narrow, wide)] == [True, False]
    assert not group.best(wide, "speedup")  # not measured


def test_markdown_marks_the_best_where_a_method_has_several_trees():
    lines = markdown_trees(BY_DEPTH, intervals=False).splitlines()
    assert lines[:2] == [
        "| levels | method | drafted | tokens a round | MBSU | tok/s |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    assert lines[2:5] == [
        "| 2 | sd | 2 | 2.00 | 1.00 | 20 |",
        "| 2 | spectr(2) | 4 | 2.50 | **1.00** | 25 |",
        "| 2 | spectr(3) | 6 | **2.62** | 0.50 | **26** |",
    ]
    assert "**2.62** (2.52–2.73)" in markdown_trees(BY_DEPTH)


def test_markdown_of_the_best_has_one_tree_a_method():
    lines = markdown_trees(BY_DEPTH, intervals=False, best_only=True).splitlines()
    assert [line.split("|")[1:3] for line in lines[2:]] == [
        [" 2 ", " sd "],
        [" 2 ", " spectr(3) "],
        [" 2 ", " rsd-c(2,2) "],
        [" 3 ", " sd "],
        [" 3 ", " rsd-c(4,1,1) "],
    ]
    assert "**" not in "".join(lines)


def test_trees_that_stop_by_their_gain_have_at_most_so_many_levels():
    lines = markdown_trees(BY_BUDGET, intervals=False).splitlines()
    assert [line.split("|")[1:4] for line in lines[2:]] == [
        [" 6 ", " sd ", " 6 "],
        [" 6 ", " opt-tree(6) ", " ≤ 20 "],
        [" 25 ", " opt-tree(25) ", " ≤ 20 "],
        [" 25 ", " eagle(25) ", " 5 "],
    ]


def test_the_terminal_shows_each_depth_once_and_the_best_in_bold():
    console = Console(width=80, record=True, file=io.StringIO(), color_system="standard")
    console.print(tree_table(BY_DEPTH))
    styled = console.export_text(styles=True, clear=False)
    words = [line.split() for line in console.export_text().splitlines()]
    rows = [line for line in words if any(w.startswith(("sd", "spectr", "rsd-c")) for w in line)]
    assert rows[0] == ["2", "sd", "2", "2.00", "1.00", "20"]
    assert rows[1] == ["spectr(2)", "4", "2.50", "1.00", "25"]
    assert rows[4][:2] == ["3", "sd"]
    assert "\x1b[1m2.62\x1b[0m" in styled and "\x1b[1m2.50\x1b[0m" not in styled


def test_a_report_has_either_a_trade_off_or_a_comparison_of_trees():
    assert trade_off_table(BY_DEPTH) is None and markdown_trade_off(BY_DEPTH) == ""
    assert tree_table(SWEEP) is None and markdown_trees(SWEEP) == ""


def test_the_plot_draws_the_best_tree_of_each_method_at_each_depth(tmp_path: Path):
    panels = choose_panels(BY_DEPTH)
    assert [p.__name__ for p in panels] == ["tree_tokens", "tree_mbsu", "tree_speed"]
    axis = Figure().subplots()
    panels[0](axis, BY_DEPTH)
    lines = {container.get_label(): container.lines[0] for container in axis.containers}
    assert {name: line.get_ydata().tolist() for name, line in lines.items()} == {
        "sd": [2.0, 2.25],
        "spectr": [2.625],
        "rsd-c": [2.75, 3.0],
    }
    assert lines["spectr"].get_xdata().tolist() == [2.0]  # in the middle of three
    plot_report(BY_DEPTH, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_trees_of_one_depth_are_drawn_as_bars():
    single = report_of(*BY_DEPTH.runs[3:6])
    assert [p.__name__ for p in choose_panels(single)] == ["tokens_bars", "speed_bars"]
