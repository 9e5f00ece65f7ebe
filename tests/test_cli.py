"""The command line: help, one-line errors, and all commands on a tiny random pair."""

import io
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import drafttrain
from drafttrain.config.base import Interrupted
from drafttrain.config.runs import newest_run, run_of
from tests.commanding import ended
from tests.small_pair import save_run
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder with a target, a finished run and two inputs."""
    root = tmp_path_factory.mktemp("project")
    torch.manual_seed(0)
    rows = [{"source": "w5 w6 w7", "reference": "w8"}, {"source": "w9 w4", "reference": "w7 w6"}]
    (root / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_target(tiny_model("marian").float(), root / "target")
    save_run(root / "checkpoints" / "tiny", root / "target", root / "test.jsonl")
    return root


def test_no_arguments_show_the_help(capsys):
    assert ended() == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("distill", "eval", "generate"))


def test_the_version_is_shown(capsys):
    assert ended("--version") == 0
    assert capsys.readouterr().out == f"drafttrain {drafttrain.__version__}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_swallowed_by_a_library_still_interrupts(capsys, monkeypatch, number):
    """C code may convert the exception that a signal raised into another error."""

    def swallow(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("drafttrain.commands.options.load_settings", swallow)
    assert ended("distill") == 130
    assert capsys.readouterr().err == "drafttrain: interrupted\n"
    for n, handler in before.items():
        signal.signal(n, handler)


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "drafttrain: interrupted\n"),
        (Interrupted("stopped; a checkpoint is in run"), 130, "a checkpoint is in run\n"),
        (KeyError("lost"), 1, "KeyError: 'lost' (a bug; --debug shows where)\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_interruptions_and_bugs_are_one_line_and_an_exit_code(
    capsys, monkeypatch, raised, code, says
):
    def end(*_: object) -> None:
        raise raised

    monkeypatch.setattr("drafttrain.commands.options.load_settings", end)
    assert ended("distill") == code
    message = capsys.readouterr().err
    assert message.endswith(says) and message.count("\n") == 1


# runs


def test_the_newest_run_is_the_one_finished_last(project, tmp_path):
    for age, name in ((30, "older"), (10, "newer"), (0, "unfinished"), (0, "target-run")):
        folder = save_run(tmp_path / name, project / "target")
        config = folder / "final" / "config.json"
        then = time.time() - age
        os.utime(config, (then, then))
        if name == "unfinished":
            config.unlink()
        if name == "target-run":
            config.write_text('{"model_type": "marian"}')
    assert newest_run(tmp_path).folder == tmp_path / "newer"


def test_a_drafter_is_found_in_its_run_by_either_folder(project):
    folder = project / "checkpoints" / "tiny"
    assert run_of(str(folder)) == run_of(str(folder / "final"))
    assert run_of(str(folder)).drafter == folder / "final"
    assert run_of(str(project / "target")) is None


# the commands, end to end


def test_eval_of_the_newest_run_leaves_report_samples_and_plot(capsys, inside):
    assert ended("eval", "repeats=1", "warmup=0") == 0
    report = json.loads((inside / "checkpoints/tiny/report.json").read_text())
    names = [one["name"] for one in report["runs"]]
    assert names[:2] == ["plain", "tiny k=4 greedy"]
    assert report["runs"][1]["metrics"]["identical"]["value"] == 1.0
    assert (inside / "checkpoints/tiny/samples.jsonl").read_text().count("\n") == 2
    assert (inside / "checkpoints/tiny/report.png").stat().st_size > 0
    assert "mean acceptance" in capsys.readouterr().out


def test_generate_reads_standard_input_and_files_alike(capsys, inside, monkeypatch):
    short = ["generate", "decode.sampling.max_new_tokens=12"]
    assert ended(*short, "--data", "test.jsonl") == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("w5 w6 w7\nw9 w4\n"))
    assert ended(*short) == 0
    assert capsys.readouterr().out == from_file
