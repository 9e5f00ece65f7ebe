"""Heads learn of clips too: labels and states against reading the clips anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import CacheConfig, DistillConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.data.distill.distill import distill
from drafttrain.data.hidden.cache import build_cache
from drafttrain.data.inputs.clips import hear
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.shards.outputs import load_distilled
from drafttrain.decoding.batching import run_single
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.teacher_forced import read_outputs, teacher_forced_probs
from drafttrain.decoding.drafters.teacher_forced_blocks import block_states
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Sampling
from drafttrain.models.identity import hash_target
from drafttrain.models.loading import LoadedTarget, load_target
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.comparing import close
from tests.data.hidden.tiny_cache import columns
from tests.tiny_drafters import drafter_of
from tests.tiny_speech import save_clips, save_whisper


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A tiny Whisper, which suppresses nothing, and what it made of five clips."""
    save_whisper(tmp_path / "target")
    path = tmp_path / "target" / "generation_config.json"
    free = {"suppress_tokens": None, "begin_suppress_tokens": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | free))
    save_clips(tmp_path / "clips", 5)
    given = {
        "target": {"path": str(tmp_path / "target"), "device": "cpu"},
        "data": {"path": str(tmp_path / "clips" / "clips.jsonl")},
        "out": tmp_path / "distilled",
        "sampling": {"max_new_tokens": 8},
    }
    distill(DistillConfig.model_validate(given))
    return tmp_path


def cache(project: Path, **settings) -> CacheConfig:
    given = {
        "target": {"path": str(project / "target"), "device": "cpu"},
        "drafter": str(project / "drafter"),
        "distilled": project / "distilled",
        "out": project / "hidden",
    }
    return CacheConfig.model_validate(given | settings)


def open_target(project: Path):
    return load_target(TargetConfig(path=str(project / "target"), device="cpu"))


def save_drafter(project: Path, target: LoadedTarget) -> SpecDrafter:
    whose = {"path": target.path, "weights_sha256": hash_target(target.model), "takes_audio": True}
    shape = {"encoder": "target", "decoder_layers": 1, "k": 3, "previous_token_rank": 2}
    drafter = drafter_of(target.model, identity=whose, **shape)
    drafter.save_pretrained(project / "drafter")
    return drafter


def test_slots_are_labelled_as_the_clips_read_anew_have_them(project):
    target = open_target(project)
    drafter = save_drafter(project, target)
    build_cache(cache(project, k=3))
    clips = load_inputs(DataConfig(path=str(project / "clips" / "clips.jsonl")), audio=True)
    reader, expected, stored = CachedModel(target.model), [], columns(project / "hidden")
    for row in load_distilled(project / "distilled"):
        output = torch.tensor(row["target_ids"])
        source = reader.read(hear(target, clips[row["row"]]))
        given = source.prefix[1:].tolist()
        assert given, "a language and a task stand before the output"
        states, _ = block_states(drafter, source.encoded, output, given)
        own = stored["hidden"][stored["rows"] == row["row"]]
        close(own[: len(output)], states[:, 0], 2e-3)  # the clips' encodings are kept in halves
        drafts = BlockDrafter(drafter)
        [known] = read_outputs(reader, [source], [output], drafts.requires)
        along = run_single(teacher_forced_probs(drafts, known, [3] * len(output), Sampling()))
        for start, block in enumerate(along.tolist()):
            for own in block[: len(output) - start]:
                expected.append(own)
                if own == 0.0:
                    break
    assert sorted(stored["acceptance"].tolist()) == sorted(expected)
    assert 0 < sum(expected) < len(expected)


def test_clips_that_are_others_now_are_refused(project):
    save_drafter(project, open_target(project))
    path = project / "clips" / "clips.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0], rows[1] = rows[1], rows[0]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="are not those that .* was distilled from"):
        build_cache(cache(project, k=3))
    assert not list((project / "hidden").glob("*"))
