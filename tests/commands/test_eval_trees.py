"""Draft trees on the command line: comparisons, sweeps, and rounds on the screen."""

from __future__ import annotations

import json
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


def shown(capsys, *arguments: str) -> str:
    capsys.readouterr()
    pair = ["--target", "llama", "--drafter", "small", "--text", "w5 w6 w7", "--json"]
    assert ended("generate", *pair, *arguments) == 0
    return capsys.readouterr().out


def test_json_of_a_tree_says_which_of_its_tokens_are_the_path(inside, capsys):
    length = f"decode.sampling.max_new_tokens={LENGTH}"
    line = json.loads(shown(capsys, "--tree", "binary", "decode.tree.nodes=6", length))
    for played in line["rounds"]:
        path = [played["drafted"][node] for node in played["path"]]
        assert path == played["emitted"][: played["accepted"]]
        assert len(played["path"]) == played["accepted"]
    assert sum((played["emitted"] for played in line["rounds"]), []) == line["tokens"]
    assert any(len(played["drafted"]) == 6 for played in line["rounds"])
    chain = json.loads(shown(capsys, length))
    assert all("path" not in played for played in chain["rounds"])
    assert chain["tokens"] == line["tokens"]
