"""`drafttrain eval` on the command line: batch sizes, teacher-forced drafters, trees."""

import json
from pathlib import Path
from unittest import mock

import pytest

from drafttrain.evaluation import runner, teacher_forced
from tests.commanding import ended
from tests.small_pair import LENGTH, PAIR, SHORT, methods_of, save_small_pair

BATCHES = [*PAIR, *SHORT, "--sweep", "k=2,4", "--batch-size", "2", "baselines=generate,assisted"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_small_pair(tmp_path_factory.mktemp("eval-commands"))


def test_a_report_has_every_batch_size_a_table_a_plot_and_a_page(inside, capsys):
    assert ended("eval", *BATCHES, "--report", "batches.json") == 0
    report = json.loads(Path("batches.json").read_text())
    runs = report["runs"]
    sizes: dict[str, list[int]] = {}
    for run in runs:
        sizes.setdefault(run["name"], []).append(run["batch_size"])
    assert sizes == {
        "plain": [1, 2],
        "small k=2 greedy": [1, 2],
        "small k=4 greedy": [1, 2],
        "generate": [1, 2],
        "assisted small k=2, constant, confidence 0": [1],
        "assisted small k=4, constant, confidence 0": [1],
    }
    equal = [run["metrics"]["identical"]["value"] for run in runs if run["batch_size"] == 2]
    assert equal == [1.0] * 4
    assert "small k=4 greedy" in capsys.readouterr().out
    assert Path("batches.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in Path("batches.html").read_text()


def test_a_larger_report_is_not_replaced(inside, capsys):
    command = ["eval", *PAIR, "repeats=1", "baselines=[]", "--report", "kept.json"]
    command += ["decode.sampling.max_new_tokens=4"]
    assert ended(*command, "--sweep", "k=2,4") == 0
    before = Path("kept.json").read_bytes()
    for name, *smaller in (
        ["kept.smaller", "--k", "2"],
        ["kept.smaller.smaller", "--sweep", "k=2,4", "--limit", "1"],
    ):
        assert ended(*command, *smaller) == 0
        printed = capsys.readouterr()
        assert "kept.json holds more (2 inputs and 2 methods) and stays" in printed.err
        assert f"report: {name}.json" in printed.out
        assert Path("kept.json").read_bytes() == before
        assert Path(f"{name}.html").is_file()
    assert len(json.loads(Path("kept.smaller.json").read_text())["runs"]) == 2
    assert ended(*command, "--sweep", "k=2,4") == 0
    assert Path("kept.json").read_bytes() != before


@pytest.mark.parametrize("mode", ["decode", "teacher-forced"])
def test_an_interrupted_evaluation_writes_a_partial_report(inside, capsys, mode):
    """Ctrl-C during the second input; an existing larger report is not replaced."""
    steps = {"decode": (runner, "_timed", 5)}
    steps["teacher-forced"] = (teacher_forced, "count_accepted", 4)

    def interrupted() -> int:
        module, name, call = steps[mode]
        ends = [mock.DEFAULT] * (call - 1) + [KeyboardInterrupt]
        with mock.patch.object(module, name, wraps=getattr(module, name), side_effect=ends):
            return ended(*command)

    command = ["eval", *PAIR, "--mode", mode]
    command += ["repeats=2", "warmup=0", "baselines=[]"] if mode == "decode" else []
    command += ["--sweep", "k=2,4", "decode.sampling.max_new_tokens=4", "--report", f"{mode}.json"]
    assert interrupted() == 130
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f"{mode}.json holds them" in printed
    report = json.loads(Path(f"{mode}.json").read_text())
    assert report["data"]["prompts"] == 1 and report["partial"] in printed
    assert all(run["totals"]["prompts"] == 1 for run in report["runs"])
    assert report["partial"] in Path(f"{mode}.html").read_text()
    assert ended(*command) == 0
    whole = Path(f"{mode}.json").read_bytes()
    assert interrupted() == 130
    assert Path(f"{mode}.json").read_bytes() == whole
    assert json.loads(Path(f"{mode}.smaller.json").read_text())["data"]["prompts"] == 1


def test_a_dry_run_lists_the_methods(inside, capsys):
    assert ended("eval", *BATCHES, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "baseline  assisted" in lines and "batches   1, 2" in lines
    assert sum(line.startswith("method ") for line in lines) == 2
    assert not Path("report.json").exists()


def test_other_drafters_are_measured_teacher_forced(inside, capsys):
    others = {
        "copied": {"drafter": "max-gram", "stop": {"k": 4}},
        "itself k=2": {"drafter": "llama", "stop": {"k": 2}},
        "itself k=4": {"drafter": "llama", "stop": {"k": 4}},
        "short": {"drafter": "small", "stop": {"k": 1}},
    }
    quick = [f"decode.sampling.max_new_tokens={LENGTH}"]
    command = ["--mode", "teacher-forced", "--sweep", "k=2,4", f"others={json.dumps(others)}"]
    assert ended("eval", *PAIR, *quick, *command, "--report", "forced.json") == 0
    runs = methods_of(json.loads(Path("forced.json").read_text()))
    assert {name: (one["other"], one["settings"].get("k")) for name, one in runs.items()} == {
        "small k=2 greedy": (None, 2),
        "small k=4 greedy": (None, 4),
        "copied": ("copied", 4),
        "itself k=2": ("itself k=2", 2),
        "itself k=4": ("itself k=4", 4),
        "short": ("short", 1),
    }
    for k in (2, 4):  # the drafter is the target, so all drafts are accepted
        itself = runs[f"itself k={k}"]
        rates = itself["acceptance_rate_per_position"]["conditional"]
        assert [rate["value"] for rate in rates] == [1.0] * k
        assert itself["metrics"]["greedy_match"]["value"] == 1.0
    rounds = [runs[name]["totals"]["rounds"] for name in ("itself k=4", "itself k=2", "short")]
    assert rounds == sorted(set(rounds))
    assert "greedy match" in " ".join(capsys.readouterr().out.split())


def test_json_of_a_tree_marks_the_accepted_path(inside, capsys):
    command = ["--target", "llama", "--drafter", "small", "--text", "w5 w6 w7", "--json"]
    command.append(f"decode.sampling.max_new_tokens={LENGTH}")
    capsys.readouterr()
    assert ended("generate", *command, "--tree", "binary", "decode.tree.nodes=6") == 0
    assert ended("generate", *command) == 0
    line, chain = map(json.loads, capsys.readouterr().out.splitlines())
    for played in line["rounds"]:
        path = [played["drafted"][node] for node in played["path"]]
        assert path == played["emitted"][: played["accepted"]]
        assert len(played["path"]) == played["accepted"]
    assert sum((played["emitted"] for played in line["rounds"]), []) == line["tokens"]
    assert any(len(played["drafted"]) == 6 for played in line["rounds"])
    assert all("path" not in played for played in chain["rounds"])
    assert chain["tokens"] == line["tokens"]
