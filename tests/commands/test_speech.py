"""Whole commands with a target that hears."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.data.inputs.clips import read_speech
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.models.loading import load_target
from tests.commanding import ended
from tests.tiny_models import near_copy
from tests.tiny_speech import save_clips, save_whisper

ON = ["--target", "whisper", "--data", "clips/clips.jsonl", "target.device=cpu"]
SHORT = "decode.sampling.max_new_tokens=8"
END = 1


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speech")
    save_whisper(root / "whisper")
    save_clips(root / "clips", 4)
    whisper = load_target(TargetConfig(path=str(root / "whisper"), device="cpu")).model
    near_copy(whisper, 0.02, seed=1).save_pretrained(root / "drafter")
    (root / "texts.txt").write_text("w5 w6\n")
    return root


def theirs(**asked: str) -> list[list[int]]:
    """What `generate` says of each clip."""
    target = load_target(TargetConfig(path="whisper", device="cpu"))
    rows = load_inputs(DataConfig(path="clips/clips.jsonl"), heard=True)
    outputs = []
    for row in rows:
        features = target.processor.feature_extractor(
            read_speech(row), sampling_rate=16_000, return_tensors="pt"
        )["input_features"]
        assert isinstance(target.model, WhisperForConditionalGeneration)
        with torch.inference_mode():
            [tokens] = target.model.generate(features, max_new_tokens=8, **asked)
        outputs.append((tokens.tolist() + [END])[:8])
    return outputs


def test_generate_writes_down_what_generate_does(inside, capsys):
    for batch_size in (1, 3):
        for drafter in ("none", "max-gram"):
            asked = ["--drafter", drafter, "--batch-size", batch_size, "--json", SHORT]
            assert ended("generate", *ON, *asked) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            assert [line["tokens"] for line in lines] == theirs()
            assert [line["source"] for line in lines][:2] == ["clip0.wav", "clip1.flac"]


HOW = {
    "chain": [],
    "tree": ["--tree", "opt-tree", "decode.tree.nodes=8"],
    "cascade": ["--cascade", "max-gram"],
}


@pytest.mark.parametrize("how", HOW)
def test_a_whisper_drafts_for_another_one(inside, capsys, how):
    for batch_size in (1, 3):
        asked = ["--drafter", "drafter", "--batch-size", batch_size, "--json", SHORT, *HOW[how]]
        assert ended("generate", *ON, *asked) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["tokens"] for line in lines] == theirs()


def test_language_and_task_are_those_asked_for(inside, capsys):
    asked = ["target.language=de", "target.task=translate", "--drafter", "none", "--json", SHORT]
    assert ended("generate", *ON, *asked) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tokens"] for line in lines] == theirs(language="de", task="translate")
    assert theirs(language="de", task="translate") != theirs()


def test_distilled_outputs_are_those_of_generate_by_either_backend(inside):
    for backend in ("transformers", "engine"):
        asked = ["--backend", backend, "--out", backend, "sampling.max_new_tokens=8"]
        assert ended("distill", *ON, *asked, "batch_tokens=30") == 0
        rows = load_distilled(backend)
        assert rows["target_ids"][:] == theirs()
        assert rows["seconds"][:] == [1.0, 2.0, 3.0, 4.0]
        languages = {prefix[0] for prefix in rows["prefix_ids"]}
        assert languages <= {5, 6, 7} and {p[1] for p in rows["prefix_ids"]} == {39}
    beams = ["method=beam", "num_beams=2", "--out", "beams", "sampling.max_new_tokens=8"]
    assert ended("distill", *ON, *beams) == 0
    assert len(load_distilled("beams")) == 4
    assert ended("distill", *ON, *beams, "--dry-run") == 0


def test_eval_reports_word_errors_and_real_time_factors(inside):
    asked = ["--drafter", "max-gram", "--report", "report.json", "repeats=1", "warmup=0"]
    asked += ["bootstrap=20", "baselines=[generate,beam]", "num_beams=2", "batch_sizes=[1]", SHORT]
    assert ended("eval", *ON, *asked) == 0
    report = json.loads(Path("report.json").read_text())
    plain, copied, generate, _ = report["runs"]
    for run in (plain, copied):
        assert all(parity["identical"] == parity["compared"] == 4 for parity in run["parity"])
    for run in (plain, copied, generate):
        metrics = run["metrics"]
        assert metrics["rtf"]["value"] > 0
        assert metrics["wer"]["value"] > 0 and "bleu" not in metrics
    assert copied["metrics"]["wer_difference"]["value"] == 0.0


def test_assisted_generation_with_the_same_drafter_is_a_baseline(inside):
    asked = ["--drafter", "drafter", "--report", "assisted.json", "repeats=1", "warmup=0", "--k", 3]
    asked += ["bootstrap=20", "baselines=[generate,assisted]", SHORT]
    assert ended("eval", *ON, *asked) == 0
    *_, generate, assisted = json.loads(Path("assisted.json").read_text())["runs"]
    assert assisted["name"].startswith("assisted causal k=3, constant, confidence 0")
    assert assisted["name"].endswith("no begin_suppress_tokens")
    assert assisted["kind"] == "baseline" and assisted["metrics"]["wer"]["value"] > 0
    assert 0 < assisted["totals"]["tokens"] <= 8 * 4
    assert generate["totals"]["prompts"] == assisted["totals"]["prompts"] == 4


@pytest.mark.parametrize("command", ["generate", "distill"])
@pytest.mark.parametrize("bad", ["texts.txt", "empty.wav", "missing.flac"])
def test_what_cannot_be_heard_is_refused_before_anything_is_written(inside, capsys, command, bad):
    Path("empty.wav").write_bytes(b"")
    asked = ["--target", "whisper", "--data", bad, "target.device=cpu"]
    asked += {"distill": ["--out", "none", "sampling.max_new_tokens=8"]}.get(
        command, ["--drafter", "none"]
    )
    before = sorted(Path().rglob("*"))
    assert ended(command, *asked) == 2
    told = capsys.readouterr().err.strip()
    assert "Traceback" not in told and Path(bad).stem in told
    assert sorted(Path().rglob("*")) == before


def test_texts_and_unknown_languages_are_refused(inside, capsys):
    assert ended("generate", *ON[:2], "--drafter", "none", "--text", "w5 w6") == 2
    assert "hears audio" in capsys.readouterr().err
    assert ended("generate", *ON, "--drafter", "none", "target.language=tlh") == 2
    assert "'tlh' is no language of this target" in capsys.readouterr().err
