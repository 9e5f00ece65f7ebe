"""Draft trees on the command line: comparisons, sweeps, and rounds on the screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.commanding import ended
from tests.small_pair import LENGTH, PAIR, SHORT, methods_of, read_trees, save_small_pair


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_small_pair(tmp_path_factory.mktemp("tree-commands"))


def compare(*arguments: str) -> tuple[dict, list[dict]]:
    """The report and the samples of `drafttrain eval`."""
    assert ended("eval", *PAIR, *SHORT, "--report", "trees.json", *arguments) == 0
    return read_trees()


def test_trees_measured_beside_a_chain_are_compared(inside, capsys):
    others = {
        "beams": {"drafter": "small", "tree": {"kind": "rsd-s", "width": 2}, "stop": {"k": 2}},
        "paths": {"drafter": "small", "tree": {"kind": "paths", "width": 3}, "stop": {"k": 2}},
    }
    report, _ = compare("--k", "2", "--temperature", "1", f"others={json.dumps(others)}")
    runs = methods_of(report)
    found = {name: (one["method"], one["sizes"]) for name, one in runs.items()}
    assert found == {
        "causal k=2 rejection": ("chain", {"depth": 2, "nodes": 2, "k": 2}),
        "beams": ("rsd-s", {"depth": 2, "nodes": 4, "width": 2}),
        "paths": ("paths", {"depth": 2, "nodes": 6, "width": 3}),
    }
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("beams", "paths", "levels", "nodes"))


def test_every_way_to_decode_says_what_it_is(inside):
    report, _ = compare("decode.tree.nodes=6", "--tree", "opt-tree", "baselines=[generate,beam]")
    assert [(one["method"], one["sizes"]) for one in report["runs"]] == [
        ("plain", {}),
        ("opt-tree", {"depth": 20, "nodes": 6, "max_draft": 20}),
        ("generate", {}),
        ("beam", {"beams": 5}),
    ]
    assert "speedup_vs_beam" in report["runs"][1]["metrics"]


def test_a_sweep_over_delta_measures_each(inside):
    report, _ = compare("--tree", "opt-tree", "--sweep", "delta=0.1,0.5", "decode.tree.nodes=9")
    assert {name: one["settings"]["delta"] for name, one in methods_of(report).items()} == {
        "opt-tree(9) gain(0.1,20) greedy": 0.1,
        "opt-tree(9) gain(0.5,20) greedy": 0.5,
    }


def shown(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert (
        ended(
            "generate", "--target", "llama", "--drafter", "small", "--text", "w5 w6 w7", *arguments
        )
        == 0
    )
    return capsys.readouterr().out


def test_rounds_of_a_tree_show_the_accepted_path_apart_from_the_rest(inside, capsys):
    length = f"decode.sampling.max_new_tokens={LENGTH}"
    plain = shown(capsys, "--drafter", "none", length).strip()
    tree = ["--tree", "opt-tree", "decode.tree.nodes=6", length]
    lines = shown(capsys, *tree, "--show-rounds").splitlines()
    rounds = [re.fullmatch(r" +(\d+) +(\d+)/(\d+) +(.*)", line) for line in lines]
    rounds = [found for found in rounds if found]
    assert rounds
    words: list[str] = []
    for found in rounds:
        accepted, drafted = int(found[2]), int(found[3])
        assert drafted in (0, 1, 2, 3, 4, 5, 6)
        kept, _, rejected = found[4].partition("×")
        path, _, added = kept.partition("+")
        assert len(path.split()) == accepted
        assert len(rejected.split()) == drafted - accepted
        words += [*path.split(), *added.split()]
    assert " ".join(word for word in words if word.startswith("w")) == plain
    assert any(len(found[4].partition("×")[2].split()) > 1 for found in rounds)


def test_json_of_a_tree_says_which_of_its_tokens_are_the_path(inside, capsys):
    length = f"decode.sampling.max_new_tokens={LENGTH}"
    line = json.loads(shown(capsys, "--tree", "binary", "decode.tree.nodes=6", length, "--json"))
    for played in line["rounds"]:
        path = [played["drafted"][node] for node in played["path"]]
        assert path == played["emitted"][: played["accepted"]]
        assert len(played["path"]) == played["accepted"]
    assert sum((played["emitted"] for played in line["rounds"]), []) == line["tokens"]
    assert any(len(played["drafted"]) == 6 for played in line["rounds"])
    chain = json.loads(shown(capsys, length, "--json"))
    assert all("path" not in played for played in chain["rounds"])
    assert chain["tokens"] == line["tokens"]
