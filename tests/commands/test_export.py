"""`drafttrain export` from the command line: what it prints, writes and refuses."""

from pathlib import Path

import pytest

from drafttrain.commands.export import export
from drafttrain.config.commands import ExportConfig
from drafttrain.config.policy import read_policy
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.export import verify
from drafttrain.export.verify import compare
from tests.commanding import ended
from tests.evaluation.reports import ENVIRONMENT, batched_report
from tests.evaluation.reports import run as measured
from tests.export.pairs import noisy_copy, save_drafter, save_head
from tests.small_pair import save_run
from tests.tiny_models import tiny_model
from tests.tiny_targets import random_sentences, save_target


@pytest.fixture
def drafter(tmp_path) -> Path:
    return save_drafter(tmp_path / "drafter")


@pytest.fixture
def few_inputs(monkeypatch) -> None:
    """Compares an export on two random inputs."""
    monkeypatch.setattr(verify, "INPUTS", 2)


@pytest.fixture
def report(tmp_path) -> Path:
    """A report of `drafttrain eval` with one method."""
    command = {"command": "/home/me/bin/drafttrain eval --drafter /home/me/tiny"}
    runs = [measured("causal k=3 greedy", 3, metrics={"speedup": Estimate(1.5, 1.4, 1.6)})]
    changes = {"environment": ENVIRONMENT.model_copy(update=command), "runs": runs}
    written = batched_report().model_copy(update=changes)
    (tmp_path / "report.json").write_text(written.model_dump_json())
    return tmp_path / "report.json"


def test_a_drafter_with_head_and_report_is_exported(capsys, tmp_path, drafter, report):
    head = save_head(tmp_path / "head", noisy_copy("llama"))
    out = tmp_path / "out"
    target = save_target(tiny_model("llama").float(), tmp_path / "target")
    given = ("--drafter", drafter, "--head", head, "--report", report, "--target", target)
    assert ended("export", *given, "--out", out) == 0
    output = capsys.readouterr().out
    assert "reloaded in a new process, every part equal to the original" in output
    assert "the target's output unchanged for 20 inputs" in output
    assert "h = 0.7" in output
    card = (out / "README.md").read_text()
    assert "1.50× (1.40–1.60×) |" in card
    assert "drafttrain eval --drafter tiny" in card and "1 thread," in card
    assert "40 prompts of `test.jsonl`" in card


@pytest.fixture
def finished_run(tmp_path, report) -> Path:
    """A run of a Spec-Drafter, with its report, plot and held-out rows."""
    target = save_target(tiny_model("marian").float(), tmp_path / "target")
    (tmp_path / "texts.txt").write_text("w5 w6\n")
    (tmp_path / "val.txt").write_text("\n".join(random_sentences(3)) + "\n")
    folder = save_run(tmp_path / "checkpoints" / "tiny", target, tmp_path / "val.txt")
    report.rename(folder / "report.json")
    (folder / "report.png").write_bytes(b"a picture")
    return folder


def test_a_run_is_exported_with_its_report_plot_data_and_target(
    capsys, tmp_path, finished_run, own_modules
):
    settings = ExportConfig(drafter=str(finished_run), out=tmp_path / "out", license="mit")
    export(settings, reload=compare)
    output = capsys.readouterr().out
    assert "drafts for 3 inputs too; the target's output unchanged for 3 inputs" in output
    assert "licence" not in output
    card = (tmp_path / "out" / "README.md").read_text()
    assert "1.50× (1.40–1.60×) |" in card
    assert "![Measured results](report.png)" in card
    assert "| its target | `target` | see its source |" in card
    assert "| its training data | `texts.txt` | see its source |" in card
    assert str(tmp_path) not in card and "/home/me" not in card
    assert "license: mit" in card
    assert (tmp_path / "out" / "report.png").read_bytes() == b"a picture"


def test_a_name_on_the_hub_is_that_of_card_and_code(capsys, tmp_path, drafter, few_inputs):
    head = save_head(tmp_path / "head", noisy_copy("llama"))
    settings = ExportConfig(drafter=str(drafter), head=head, out=tmp_path / "out", hub="user/mine")
    export(settings, reload=compare)
    assert f"hf upload user/mine {tmp_path / 'out'}" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'custom_generate="user/mine"' in card
    assert "speculative decoding of `org/tiny-target`" in card  # the head's


def test_the_draft_length_is_that_of_the_policy_next_to_the_drafter_else_a_short_one(
    tmp_path, drafter, few_inputs
):
    """`drafttrain tune --write` writes the policy there."""
    for length in (4, 9):
        out = tmp_path / f"out{length}"
        export(ExportConfig(drafter=str(drafter), out=out), reload=compare)
        assert read_policy(out / "policy.json").k == length
        (drafter / "policy.json").write_text('{"stop": "fixed", "k": 9}')
