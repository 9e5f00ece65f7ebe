"""Replay end to end: a drafter is trained, traced on its own prompts, and trained on with that."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from drafttrain.cli import main as drafttrain
from drafttrain.data.shards.outputs import load_distilled
from recipes import train_causal_drafter, train_parallel_drafter
from tests.recipes.test_train_causal_drafter import make_project, on_the_cpu  # noqa: F401
from tests.recipes.tiny_recipe import exit_code, resumed_as_if_never_stopped


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run of two steps, and rounds.jsonl, its rounds on the prompts that it was trained on: their
    folder, and the arguments of another run that goes on from there with them."""
    folder, said = tmp_path_factory.mktemp("traced"), io.StringIO()
    arguments, first = make_project(folder), folder / "first"
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()):
        patched.setenv("ACCELERATE_USE_CPU", "true")
        two = [*arguments, f"run={first}", "train.max_steps=2"]
        assert exit_code(train_causal_drafter.main, *two) == 0
        asked = ["--drafter", str(first), "--data", str(folder / "train.txt"), "data.chat=true"]
        with redirect_stdout(said):
            asked += ["--json", "--max-new-tokens", "8"]
            assert exit_code(drafttrain, "generate", *asked) == 0
    (folder / "rounds.jsonl").write_text(said.getvalue())
    arguments += [f"initialise={{path: {first / 'final'}}}", f"distilled={first / 'distilled'}"]
    return folder, [*arguments, f"replay.path={folder / 'rounds.jsonl'}"]


def rejected_by_hand(folder: Path) -> tuple[int, int]:
    """Rejected tokens that the drafter can draft, and tokens of all outputs."""
    config = json.loads((folder / "first/final/config.json").read_text())
    rows = load_distilled(folder / "first/distilled")
    lines = {line["row"]: line for line in map(json.loads, (folder / "rounds.jsonl").open())}
    rejected = 0
    for number, output in zip(rows["row"], rows["target_ids"], strict=True):
        assert lines[number]["tokens"] == output
        place = 0
        for one in lines[number]["rounds"]:
            if one["drafted"][: len(one["emitted"])] != one["emitted"][: len(one["drafted"])]:
                missed = output[place + one["accepted"]]
                rejected += missed in config["draftable_tokens"]
            place += len(one["emitted"])
    return rejected, sum(map(len, rows["target_ids"]))


def test_what_an_earlier_drafter_missed_makes_other_weights_and_resumes_to_the_same_bits(
    traced, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, arguments = traced
    rejected, tokens = rejected_by_hand(folder)
    assert rejected > 0
    arguments = [*arguments, f"run={tmp_path / 'run'}"]
    assert exit_code(train_causal_drafter.main, *arguments, "--dry-run") == 0
    assert f"replay       {folder / 'rounds.jsonl'}: " in capsys.readouterr().out
    resumed_as_if_never_stopped(train_causal_drafter.main, arguments, tmp_path, "final")
    said = capsys.readouterr().err
    assert f"8 rows traced, {rejected} of {tokens} learned tokens rejected" in said
    record = json.loads((tmp_path / "run/replay.json").read_text())
    assert record["weight"] == pytest.approx(1 + tokens / rejected)
    assert other_weights(train_causal_drafter.main, arguments, tmp_path)


def other_weights(main: Callable[[list[str]], None], arguments: list[str], folder: Path) -> bool:
    """Whether FOLDER/run ended with other weights than a run without replay does."""
    without = ["replay={}", f"run={folder / 'off'}"]
    assert exit_code(main, *(a for a in arguments if "replay" not in a), *without) == 0
    one, two = (folder / run / "final/model.safetensors" for run in ("run", "off"))
    return one.read_bytes() != two.read_bytes()


def test_samples_of_eval_replay_the_same_tokens_with_a_cached_teacher_and_own_drafts(
    traced, tmp_path: Path
) -> None:
    folder, arguments = traced
    quick = ["repeats=1", "warmup=0", "bootstrap=20", "baselines=[]", "data.chat=true"]
    own = ["--drafter", str(folder / "first"), "--data", str(folder / "train.txt"), "--k", "3"]
    report = ["--report", str(tmp_path / "report.json"), "--max-new-tokens", "8"]
    assert exit_code(drafttrain, "eval", *own, *quick, *report) == 0
    more = [f"replay.path={tmp_path / 'samples.jsonl'}", f"run={tmp_path / 'run'}"]
    more += ["teacher={kind: cached, top_k: 4}", f"teacher.folder={tmp_path / 'teacher'}"]
    more += ["replay.share=0.2", "on_policy={share: 0.3, new_tokens: 4}", "train.max_steps=2"]
    assert exit_code(train_causal_drafter.main, *arguments, *more) == 0
    record = json.loads((tmp_path / "run/replay.json").read_text())
    assert (record["rejected"], record["tokens"]) == rejected_by_hand(folder)


def test_blocks_learn_what_was_missed_too(traced, tmp_path: Path) -> None:
    arguments = [*traced[1], f"run={tmp_path / 'run'}", "train.max_steps=2"]
    arguments += ["objective.packed_tokens=120", "train.batch_tokens=120"]
    assert exit_code(train_parallel_drafter.main, *arguments) == 0
    assert other_weights(train_parallel_drafter.main, arguments, tmp_path)


def test_a_trace_of_another_target_is_refused(
    traced, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder, arguments = traced
    file, run = tmp_path / "other.jsonl", tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").open()]
    for line in lines:
        line["rounds"] = [{"drafted": [], "accepted": 0, "emitted": [3]}] * 8
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [f"replay.path={file}", f"run={run}"]
    assert exit_code(train_causal_drafter.main, *arguments, *own) == 2
    told = capsys.readouterr().err
    assert f"replay.path = {str(file)!r} is not along the target's distilled outputs" in told
    assert "whose token 0 is 3 there" in told and "Traceback" not in told
    assert not (run / "replay.json").exists()


def test_a_file_that_is_missing_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for main in (train_causal_drafter.main, train_parallel_drafter.main):
        missing = [*make_project(tmp_path), f"replay.path={tmp_path / 'none.jsonl'}"]
        assert exit_code(main, *missing) == 2
        assert "none.jsonl' is no file; give what" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
