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


def run_of(method, verifier, depth, nodes, tokens, mbsu=1.0, stop=None, **sizes):
    stop = stop or f"k={depth}"
    values = {"mean_acceptance_length": tokens, "mbsu": mbsu, "tokens_per_second": 10 * tokens}
    return Run(
        name="plain" if method == "plain" else f"{method} {sizes} {stop} {verifier}",
        kind="plain" if method == "plain" else "method",
        method=method,
        sizes={} if depth is None else {"depth": depth, "nodes": nodes, **sizes},
        drafter="causal",
        stop=stop,
        verifier=verifier,
        sampling=SAMPLING,
        lossless=True,
        settings={},
        metrics={name: Estimate(v, v - 0.1, v + 0.1) for name, v in values.items()},
    )


def report_of(*runs):
    return Report(
        mode="decode",
        target=TargetFacts(path="models/tiny", parameters=10, dtype="float32", device="cpu"),
        data=DataFacts(path="data/tiny.txt", prompts=4, references=0),
        environment=ENVIRONMENT,
        options={},
        runs=[run_of("plain", "rejection", None, None, 1.0), *runs],
    )


GAIN = {"stop": "gain(0.2,20)", "max_draft": 20}
BY_DEPTH = report_of(
    run_of("chain", "rejection", 2, 2, 2.0, k=2),
    run_of("chain", "rejection", 3, 3, 2.25, k=3),
    run_of("paths", "k-seq", 2, 4, 2.5, width=2),
    run_of("paths", "k-seq", 2, 6, 2.625, mbsu=0.5, width=3),
    run_of("rsd-c", "recursive", 2, 6, 2.75, branching=[2, 2]),
    run_of("rsd-c", "recursive", 3, 12, 3.0, branching=[4, 1, 1]),
)
BY_BUDGET = report_of(
    run_of("chain", "greedy", 6, 6, 2.0, k=6),
    run_of("opt-tree", "greedy", 20, 6, 2.5, **GAIN),
    run_of("opt-tree", "greedy", 20, 25, 3.5, **GAIN),
    run_of("eagle", "greedy", 5, 25, 3.0),
)
SWEEP = report_of(
    *(
        run_of("chain", "greedy", k, k, 2.0, k=k).model_copy(update={"settings": {"k": k}})
        for k in (4, 6)
    )
)


@pytest.mark.parametrize(
    ("kind", "verifier", "sizes", "method", "name"),
    [
        ("chain", "rejection", {"k": 2}, "sd", "sd"),
        ("cascade", "greedy", {"increments": [[2]]}, "cascade", "cascade"),
        ("paths", "k-seq", {"width": 3}, "spectr", "spectr(3)"),
        ("paths", "multi-round", {"width": 3}, "specinfer", "specinfer(3)"),
        ("paths", "multi-round", {"width": 1, "drafters": 2}, "specinfer", "specinfer(1+1)"),
        ("paths", "greedy", {"width": 3}, "paths", "paths(3)"),
        ("rsd-c", "recursive", {"branching": [2, 2, 1]}, "rsd-c", "rsd-c(2,2,1)"),
        ("rsd-s", "recursive", {"width": 3}, "rsd-s", "rsd-s(3)"),
        ("opt-tree", "target-walk", {}, "opt-tree", "opt-tree(6)"),
        ("opt-tree,head", "target-walk", {}, "opt-tree,head", "opt-tree(6,head)"),
    ],
)
def test_methods_have_their_papers_names(kind, verifier, sizes, method, name):
    run = run_of(kind, verifier, 2, 6, 2.0, **sizes)
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
        BY_BUDGET.runs[3].model_copy(update={"settings": {"delta": delta}}) for delta in (0.1, 0.2)
    ]
    swept = report_of(*runs)
    assert compared_by(swept) is None and trade_off_table(swept) is not None
    compared = swept.model_copy(update={"compared_by": "nodes"})
    assert trade_off_table(compared) is None and len(tree_groups(compared)) == 1


def test_trees_beside_a_chain_are_compared_though_only_the_chain_has_a_length():
    chain = SWEEP.runs[1]
    found = report_of(chain, *BY_BUDGET.runs[2:4])
    assert compared_by(found) == "depth" and trade_off_table(found) is None
    assert [run.method for group in tree_groups(found) for run in group.runs] == [
        "chain",
        "opt-tree",
        "opt-tree",
    ]


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
        "| levels | method | draft tokens | mean acceptance length | MBSU | tok/s |",
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
    assert trade_off_table(SWEEP) is not None
    assert tree_table(SWEEP) is None and markdown_trees(SWEEP) == ""


def test_the_plot_draws_the_best_tree_of_each_method_at_each_depth(tmp_path: Path):
    panels = choose_panels(BY_DEPTH)
    assert [p.__name__ for p in panels] == ["tree_length", "tree_mbsu", "tree_speed"]
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
    assert [p.__name__ for p in choose_panels(single)] == ["length_bars", "speed_bars"]
