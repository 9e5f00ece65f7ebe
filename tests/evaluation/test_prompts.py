"""Messages on inputs that a drafter was trained on, and on outputs cut by positions."""

import json
from pathlib import Path

import pytest

from drafttrain.config.base import counted
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.evaluation.prompts import say_training_inputs
from tests.commanding import ended
from tests.small_pair import save_run
from tests.tiny_models import tiny_model
from tests.tiny_speech import save_clips
from tests.tiny_targets import save_target


@pytest.fixture(autouse=True)
def _project(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_inputs_of_the_drafters_training_are_counted(capsys):
    run = save_run(Path("run"), save_target(tiny_model("marian").float(), Path("target")))
    Path("new.txt").write_text("w5 w6\n\nw7\n")
    rows = load_inputs(DataConfig(path="new.txt"))
    capsys.readouterr()
    for text, message in (
        ("w4\nw5 w6\n\n", "the drafter's training data hold 1 of 2 inputs too\n"),
        ("w4\n", ""),
        ("", ""),
    ):
        Path("texts.txt").write_text(text)
        say_training_inputs(str(run), rows)
        assert (printed := capsys.readouterr().err).endswith(message), printed
        assert ("too" in printed) == bool(message)
    say_training_inputs("max-gram", rows)
    assert capsys.readouterr().err == ""
    recipe = run / "run.yaml"
    recipe.write_text(recipe.read_text().replace("texts.txt", str(save_clips(Path("old"), 2))))
    clips = load_inputs(DataConfig(path=str(save_clips(Path("new"), 3))), audio=True)
    say_training_inputs(str(run), clips)
    assert capsys.readouterr().err.endswith("data hold 2 of 3 inputs too\n")


@pytest.mark.parametrize("mode", ["decode", "teacher-forced"])
def test_outputs_cut_by_the_targets_positions_are_counted(mode, capsys):
    """16 positions: 3 of the prompt and 13 of new tokens; the last new token needs none."""
    target = tiny_model("llama", max_position_embeddings=16).float()
    target.generation_config.update(eos_token_id=39, bad_words_ids=[[39]], pad_token_id=0)
    save_target(target, Path("target"))
    Path("rows.txt").write_text("w5 w6 w7\nw4\n")
    given = ["--target", "target", "--drafter", "max-gram", "--data", "rows.txt"]
    for wanted, cut in ((14, 0), (15, 1), (17, 2)):
        arguments = [*given, f"decode.sampling.max_new_tokens={wanted}"]
        own = ["--mode", mode, "--report", f"{wanted}.json"]
        own += ["repeats=1", "warmup=0", "baselines=generate"] if mode == "decode" else []
        assert ended("eval", *arguments, *own) == 0
        message = " ".join(capsys.readouterr().out.split())
        assert (f"{counted(cut, 'output')} cut where the target's" in message) == bool(cut)
        report = json.loads(Path(f"{wanted}.json").read_text())
        assert report["data"]["cut_by_positions"] == cut
    if mode == "decode":
        capsys.readouterr()
        assert ended("generate", *arguments) == 0
        assert "row 0: cut after 14 tokens at the target's max" in capsys.readouterr().err
