"""Whole commands with a speech target."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import WhisperForConditionalGeneration

from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.data.inputs.clips import read_speech
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.models.loading import load_target
from drafttrain.models.spec_drafter.model import SpecDrafter
from recipes.train_spec_drafter import main
from tests.commanding import ended, exit_code
from tests.tiny_models import near_copy
from tests.tiny_speech import save_clips, save_whisper

ON = ["--target", "whisper", "--data", "clips/clips.jsonl", "target.device=cpu"]
SHORT = "decode.sampling.max_new_tokens=8"
END = 1


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("speech")
    save_whisper(root / "whisper")
    save_clips(root / "clips", 4)
    whisper = load_target(TargetConfig(path=str(root / "whisper"), device="cpu")).model
    near_copy(whisper, 0.02, seed=1).save_pretrained(root / "drafter")
    (root / "texts.txt").write_text("w5 w6\n")
    (root / "empty.wav").write_bytes(b"")
    recipe = {
        "run": "run",
        "target": {"path": "whisper", "device": "cpu"},
        "data": {"path": "clips/clips.jsonl", "skip": 2},
        "held_out": {"path": "clips/clips.jsonl", "limit": 2},
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"decoder_layers": 1, "k": 4, "previous_token_rank": 4},
        "objective": {"freeze_embeddings": True},
        "train": {"max_steps": 4, "batch_tokens": 100, "validate_every": 2, "threads": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


def theirs(**arguments: str) -> list[list[int]]:
    """Returns the output of `generate` for each clip."""
    target = load_target(TargetConfig(path="whisper", device="cpu"))
    rows = load_inputs(DataConfig(path="clips/clips.jsonl"), audio=True)
    outputs = []
    for row in rows:
        features = target.processor.feature_extractor(
            read_speech(row), sampling_rate=16_000, return_tensors="pt"
        )["input_features"]
        assert isinstance(target.model, WhisperForConditionalGeneration)
        with torch.inference_mode():
            [tokens] = target.model.generate(features, max_new_tokens=8, **arguments)
        outputs.append((tokens.tolist() + [END])[:8])
    return outputs


def generated(capsys, *arguments: object) -> list[dict]:
    """Returns the lines of `drafttrain generate` for the clips."""
    capsys.readouterr()
    assert ended("generate", *ON, *arguments, "--json", SHORT) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


HOW = {
    "plain": ["none"],
    "copies": ["max-gram"],
    "tree": ["drafter", "--tree", "opt-tree", "decode.tree.nodes=8"],
    "cascade": ["drafter", "--cascade", "max-gram"],
    "trained": ["run"],
}


@pytest.mark.parametrize("how", HOW)
def test_transcripts_equal_those_of_generate(inside, run, capsys, how):
    expected = theirs()
    for batch_size in (1, 3):
        lines = generated(capsys, "--drafter", *HOW[how], "--batch-size", batch_size)
        assert [line["tokens"] for line in lines] == expected
        assert [line["source"] for line in lines][:2] == ["clip0.wav", "clip1.flac"]


def test_language_and_task_are_as_set(inside, capsys):
    settings = ["target.language=de", "target.task=translate"]
    lines = generated(capsys, *settings, "--drafter", "none")
    assert [line["tokens"] for line in lines] == theirs(language="de", task="translate") != theirs()


def test_distilled_outputs_are_those_of_generate_by_either_backend(inside):
    for backend, size in {"transformers": "batch_tokens=30", "engine": "batch_rows=2"}.items():
        arguments = ["--backend", backend, "--out", backend, "sampling.max_new_tokens=8"]
        assert ended("distill", *ON, *arguments, size) == 0
        rows = load_distilled(backend)
        assert rows["target_ids"][:] == theirs()
        assert rows["seconds"][:] == [1.0, 2.0, 3.0, 4.0]
        languages = {prefix[0] for prefix in rows["prefix_ids"]}
        assert languages <= {5, 6, 7} and {p[1] for p in rows["prefix_ids"]} == {39}
    beams = ["method=beam", "num_beams=2", "--out", "beams", "sampling.max_new_tokens=8"]
    assert ended("distill", *ON, *beams) == 0
    assert len(load_distilled("beams")) == 4
    assert ended("distill", *ON, *beams, "--dry-run") == 0


def test_eval_reports_word_errors_and_real_time_factors_also_of_assisted_generation(inside):
    arguments = ["--drafter", "drafter", "--report", "report.json", "--k", 3, SHORT]
    arguments += ["repeats=1", "warmup=0", "baselines=[generate,beam,assisted]"]
    assert ended("eval", *ON, *arguments) == 0
    plain, drafted, generate, _, assisted = json.loads(Path("report.json").read_text())["runs"]
    for run in (plain, drafted):
        assert all(parity["identical"] == parity["compared"] == 4 for parity in run["parity"])
    for run in (plain, drafted, generate, assisted):
        metrics = run["metrics"]
        assert metrics["rtf"]["value"] > 0
        assert metrics["wer"]["value"] > 0 and "bleu" not in metrics
        assert run["totals"]["prompts"] == 4
    assert drafted["metrics"]["wer_difference"]["value"] == 0.0
    name = "assisted drafter k=3, constant, confidence 0"
    assert assisted["name"].startswith(name) and assisted["name"].endswith("begin_suppress_tokens")
    assert assisted["kind"] == "baseline" and 0 < assisted["totals"]["tokens"] <= 8 * 4


# a Spec-Drafter, trained from recordings


@pytest.fixture(scope="module")
def run(project) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert exit_code(main, "--config", "recipe.yaml") == 0
    return project / "run"


def test_training_freezes_embeddings_and_keeps_encoder_states(run):
    trained = SpecDrafter.from_pretrained(run / "final")
    assert trained.shape.encoder == "target"
    assert len(list((run / "encoded").rglob("*.safetensors"))) == 4
    target = WhisperForConditionalGeneration.from_pretrained(run.parent / "whisper")
    embeddings = target.get_decoder().embed_tokens.weight
    assert torch.equal(trained.embed_tokens.weight[: len(embeddings)], embeddings)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("mean_acceptance_length", 0) >= 1 for row in metrics)


WRONG = {
    "distill --data texts.txt --out new sampling.max_new_tokens=8": "texts",
    "generate --data texts.txt --drafter none": "texts",
    "distill --data empty.wav --out new sampling.max_new_tokens=8": "empty",
    "generate --data missing.flac --drafter none": "missing",
    "generate --text w5 --drafter none": "takes audio",
    f"generate {' '.join(ON[2:])} --drafter none target.language=tlh": "'tlh' is not a language of",
    "cache --drafter run/final --distilled run/distilled --out new": "takes audio",
    f"generate {' '.join(ON[2:])} --drafter run --target other {SHORT}": "'whisper' with other wei",
}


@pytest.mark.parametrize("line", WRONG)
def test_inputs_and_models_for_no_speech_are_refused_before_any_output(inside, run, capsys, line):
    if not Path("other").exists():
        save_whisper(Path("other"))
        other = WhisperForConditionalGeneration.from_pretrained("other")
        other.model.encoder.layer_norm.weight.data += 0.5
        other.save_pretrained("other")
    before = sorted(Path().rglob("*"))
    command, *arguments = line.split()
    capsys.readouterr()
    assert ended(command, *ON[:2], *arguments) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed and WRONG[line] in printed
    assert sorted(Path().rglob("*")) == before
