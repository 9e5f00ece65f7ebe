"""Draft trees on the command line: methods compared, reports, samples, and rounds on the screen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from drafttrain.cli import main
from tests.export.pairs import noisy_copy
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

LENGTH = 10
SHORT = ["baselines=[generate]", "repeats=1", "warmup=0", "bootstrap=20"]
SHORT += [f"decode.sampling.max_new_tokens={LENGTH}", "decode.sampling.top_k=20"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A decoder-only pair, prompts to report on, and others to measure acceptance by rank on."""
    root = tmp_path_factory.mktemp("tree-commands")
    save_target(tiny_model("llama").float(), root / "llama")
    save_target(noisy_copy("llama", 0.5).float(), root / "small")
    (root / "texts.txt").write_text("w5 w6 w7\nw9 w4 w30\n")
    (root / "others.txt").write_text("w12 w20\nw8 w33 w5\n")
    return root


@pytest.fixture
def inside(project, monkeypatch) -> Path:
    monkeypatch.chdir(project)
    return project


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


PAIR = ["--target", "llama", "--drafter", "small", "--data", "texts.txt"]


def compare(*arguments: str) -> tuple[dict, list[dict]]:
    """The report and the samples of `drafttrain eval`."""
    run("eval", *PAIR, *SHORT, "--report", "trees.json", *arguments)
    samples = Path("trees.samples.jsonl").read_text().splitlines()
    return json.loads(Path("trees.json").read_text()), [json.loads(line) for line in samples]


def methods_of(report: dict) -> dict[str, dict]:
    return {one["name"]: one for one in report["runs"] if one["kind"] == "method"}


def test_sampled_methods_are_compared_at_a_depth(inside, capsys):
    methods = "sd,spectr,specinfer,rsd-c,rsd-s"
    report, samples = compare("--methods", methods, "--depth", "2", "--temperature", "1")
    runs = methods_of(report)
    assert {name: one["settings"]["nodes"] for name, one in runs.items()} == {
        "causal k=2 rejection": 2,
        "paths(2) k=2 k-seq": 4,
        "paths(3) k=2 k-seq": 6,
        "paths(2) k=2 multi-round": 4,
        "paths(3) k=2 multi-round": 6,
        "rsd-c(2,2) k=2 recursive": 6,
        "rsd-c(2,1) k=2 recursive": 4,
        "rsd-c(3,1) k=2 recursive": 6,
        "rsd-s(2) k=2 recursive": 4,
        "rsd-s(3) k=2 recursive": 6,
    }
    assert {one["settings"]["depth"] for one in runs.values()} == {2}
    for one in runs.values():
        assert_counts_agree(one)
    assert_samples_are_the_outputs(samples)
    assert "rsd-s(3)" in capsys.readouterr().out


def assert_counts_agree(one: dict) -> None:
    """Totals, positions and rates of a run say the same; a level is a position."""
    totals, positions = one["totals"], one["by_position"]
    depth, nodes = one["settings"]["depth"], one["settings"]["nodes"]
    assert totals["drafted"] <= nodes * totals["rounds"]
    assert totals["passes"] <= depth * totals["rounds"]
    assert len(positions["drafted"]) <= depth
    assert sum(positions["accepted"]) == totals["accepted"]
    levels = sum(positions["drafted"])  # one call each; all nodes of an opt-tree's may be displaced
    assert levels == totals["passes"] or "opt-tree" in one["name"] and levels < totals["passes"]
    rate = one["metrics"]["mean_acceptance_length"]["value"]
    assert rate == pytest.approx(totals["tokens"] / totals["rounds"])
    by_hand = totals["tokens"] / (totals["rounds"] + totals["passes"])  # models of one size
    assert one["metrics"]["mbsu"]["value"] == pytest.approx(by_hand)


def assert_samples_are_the_outputs(samples: list[dict]) -> None:
    """A round's accepted tokens are among those drafted, and its text is what it emitted."""
    rounds = 0
    for line in samples:
        for one in line["outputs"].values():
            words = [word for played in one.get("rounds", []) for word in played["emitted"]]
            if "rounds" in one:
                assert one["text"].split() == [word for word in words if word.startswith("w")]
            for played in one.get("rounds", []):
                rounds += 1
                accepted = played["emitted"][: played["accepted"]]
                assert set(accepted) <= set(played["drafted"])
                assert 0 <= len(played["emitted"]) - played["accepted"] <= 1
    assert rounds > 0


def test_greedy_methods_write_what_plain_decoding_does(inside, capsys):
    report, samples = compare(
        *["--methods", "sd,opt-tree,binary,sequoia", "--depth", "2", "--budget", "6"],
        "rank_data.path=others.txt",
    )
    runs = methods_of(report)
    assert sorted(runs) == [
        "binary(6) k=2 greedy",
        "causal k=2 greedy",
        "causal k=6 greedy",
        "opt-tree(6) gain(0.2,20) greedy",
        "opt-tree(6) k=2 greedy",
        "sequoia(6) k=2 greedy",
        "sequoia(6) k=6 greedy",
    ]
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


def test_a_sweep_over_delta_measures_each(inside):
    report, _ = compare("--tree", "opt-tree", "--sweep", "delta=0.1,0.5", "decode.tree.nodes=9")
    assert {name: one["settings"]["delta"] for name, one in methods_of(report).items()} == {
        "opt-tree(9) gain(0.1,20) greedy": 0.1,
        "opt-tree(9) gain(0.5,20) greedy": 0.5,
    }


def shown(capsys, *arguments: str) -> str:
    capsys.readouterr()
    run("generate", "--target", "llama", "--drafter", "small", "--text", "w5 w6 w7", *arguments)
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
