"""A Spec-Drafter for a target that hears, from recordings to decoding, by the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import WhisperForConditionalGeneration

from drafttrain.models.spec_drafter.model import SpecDrafter
from recipes.train_spec_drafter import main
from tests.commanding import ended
from tests.recipes.tiny_recipe import exit_code
from tests.tiny_speech import save_clips, save_whisper

ON = ["--target", "whisper", "--data", "clips/clips.jsonl", "target.device=cpu"]
SHORT = "decode.sampling.max_new_tokens=8"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("speech-drafter")
    save_whisper(root / "whisper")
    save_clips(root / "clips", 6)
    recipe = {
        "run": "run",
        "target": {"path": "whisper", "device": "cpu"},
        "data": {"path": "clips/clips.jsonl"},
        "held_out": {"path": "clips/clips.jsonl", "limit": 2},
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"decoder_layers": 1, "k": 4, "previous_token_rank": 4},
        "objective": {"freeze_embeddings": True},
        "train": {"max_steps": 4, "batch_tokens": 100, "validate_every": 2, "threads": 1},
    }
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


@pytest.fixture(scope="module")
def run(project: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert exit_code(main, "--config", "recipe.yaml") == 0
    return project / "run"


def test_training_leaves_embeddings_alone_and_keeps_what_was_encoded(run):
    trained = SpecDrafter.from_pretrained(run / "final")
    assert trained.encoder is None and trained.config.encoder == "target"
    assert len(list((run / "encoded").rglob("*.safetensors"))) == 6
    start = SpecDrafter(trained.config)
    assert trained.embedding.weight.shape == start.embedding.weight.shape
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("mean_acceptance_length", 0) >= 1 for row in metrics)


def test_generate_writes_down_the_same_with_the_drafter(inside, run, capsys):
    found = {}
    for drafter in ("none", "run"):
        for batch_size in (1, 4):
            asked = ["--drafter", drafter, "--batch-size", batch_size, "--json", SHORT]
            assert ended("generate", *ON, *asked) == 0
            lines = capsys.readouterr().out.splitlines()
            found[drafter, batch_size] = [json.loads(line)["tokens"] for line in lines]
    assert len({json.dumps(tokens) for tokens in found.values()}) == 1


def test_another_target_is_refused(inside, run, capsys):
    other = save_whisper(Path("other"))
    model = WhisperForConditionalGeneration.from_pretrained(other)
    model.model.encoder.layer_norm.weight.data += 0.5
    model.save_pretrained(other)
    asked = ["--target", "other", "--data", "clips/clips.jsonl", "target.device=cpu"]
    assert ended("generate", *asked, "--drafter", "run", SHORT) == 2
    assert "was trained on target 'whisper' with other weights" in capsys.readouterr().err
