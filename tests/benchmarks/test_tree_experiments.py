"""Comparison of methods at equal depth and budget on tiny models: reports, samples, table."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.commanding import ended
from tests.small_pair import PAIR, SHORT, methods_of, read_trees, save_small_pair

Compare = Callable[..., tuple[dict, list[dict]]]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_small_pair(tmp_path_factory.mktemp("tree-experiments"))


@pytest.fixture
def compare(project, monkeypatch) -> Compare:
    """Runs the experiments in the project and returns the report and the samples."""
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    experiments = import_module("tree_experiments")

    def run(*arguments: str) -> tuple[dict, list[dict]]:
        Path("trees.json").unlink(missing_ok=True)
        experiments.main([*PAIR, *SHORT, *arguments])
        return read_trees()

    return run


def test_sampled_methods_are_compared_at_a_depth(compare, capsys):
    methods = "sd,spectr,specinfer,rsd-c,rsd-s"
    report, samples = compare("--methods", methods, "--depth", "2", "--temperature", "1")
    runs = methods_of(report)
    assert {name: one["sizes"]["nodes"] for name, one in runs.items()} == {
        "small k=2 rejection": 2,
        "small paths(2) k=2 k-seq": 4,
        "small paths(3) k=2 k-seq": 6,
        "small paths(2) k=2 multi-round": 4,
        "small paths(3) k=2 multi-round": 6,
        "small rsd-c(2,2) k=2 recursive": 6,
        "small rsd-c(2,1) k=2 recursive": 4,
        "small rsd-c(3,1) k=2 recursive": 6,
        "small rsd-s(2) k=2 recursive": 4,
        "small rsd-s(3) k=2 recursive": 6,
    }
    assert {one["sizes"]["depth"] for one in runs.values()} == {2}
    for one in runs.values():
        assert_counts_agree(one)
    assert "rsd-s(3)" in capsys.readouterr().out
    table = Path("trees.md").read_text().splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == ["2"] * 5
    for kind in ("k=2", "paths", "rsd-c", "rsd-s"):
        own = {name: one for name, one in runs.items() if name.startswith(f"small {kind}")}
        best = max(own, key=lambda name: own[name]["metrics"]["mean_acceptance_length"]["value"])
        assert any(f"| {best} |" in line for line in table)


def assert_counts_agree(one: dict) -> None:
    """Asserts that totals, positions and rates of a run agree; a level is a position."""
    totals, positions = one["totals"], one["acceptance_rate_per_position"]
    depth, nodes = one["sizes"]["depth"], one["sizes"]["nodes"]
    assert totals["drafted"] <= nodes * totals["rounds"]
    assert totals["passes"] <= depth * totals["rounds"]
    assert len(positions["drafted"]) <= depth
    assert sum(positions["accepted"]) == totals["accepted"]
    levels = sum(positions["drafted"])  # one call each; all nodes of an opt-tree's may be displaced
    assert levels == totals["passes"] or "opt-tree" in one["name"] and levels < totals["passes"]
    rate = one["metrics"]["mean_acceptance_length"]["value"]
    assert rate == pytest.approx(totals["tokens"] / totals["rounds"])
    by_hand = totals["tokens"] / (totals["rounds"] + totals["passes"])  # models of equal size
    assert one["metrics"]["mbsu"]["value"] == pytest.approx(by_hand)


def test_greedy_trees_of_the_page_write_what_plain_decoding_does(project, monkeypatch, capsys):
    """The settings of benchmarks/results/trees.yaml, on a small pair."""
    monkeypatch.chdir(project)
    Path("trees.json").unlink(missing_ok=True)
    kinds = ("opt-tree", "sequoia", "eagle", "binary")
    drafters = [f"others.{kind}.drafter=small" for kind in kinds]
    settings = ["--config", str(BENCHMARKS / "results" / "trees.yaml"), *drafters]
    settings += ["rank_data.path=others.txt", "--report", "trees.json"]
    assert ended("eval", *settings, *PAIR, *SHORT) == 0
    report, samples = read_trees()
    runs = methods_of(report)
    assert sorted(runs) == sorted(["small k=8 greedy", *kinds])
    for one in runs.values():
        assert_counts_agree(one)
        for parity in one["parity"]:
            assert parity["identical"] == parity["compared"] == 2
    for line in samples:
        assert {one["text"] for one in line["outputs"].values()} == {line["plain"]}
    printed = capsys.readouterr().out
    [shares] = re.findall(r"acceptance by rank on 2 prompts of others.txt: (.*)", printed)
    values = [float(share) for share in shares.split(", ")]
    assert len(values) == 16 and 0 < sum(values) <= 1.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "sd,rsd-s"], "methods given without depth or budget"),
        (["--methods", "sd", "--depth", "2", "sweep={k: [1, 2]}"], "methods and sweep"),
    ],
)
def test_wrong_input_ends_in_one_line(compare, arguments, message):
    with pytest.raises(SystemExit) as ended:
        compare(*arguments)
    assert str(ended.value).startswith("error: ") and message in str(ended.value)
