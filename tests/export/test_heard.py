"""Exports of a decoder that shares its target's encoder: what plain Transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from drafttrain.config.commands import ExportConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.export.heard import CLIPS, gaps_on_noise, made_up_encoding, noise
from drafttrain.export.parts import load_parts, programs
from drafttrain.export.reload import compare
from drafttrain.export.verify import Check, verify
from drafttrain.models.loading import load_target
from tests.commanding import ended
from tests.export.pairs import export_to
from tests.tiny_models import near_copy, tiny_model
from tests.tiny_speech import save_whisper, shallow


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A Whisper, a shallow decoder for it with the target's tokenizer, and an export of that."""
    root = tmp_path_factory.mktemp("heard")
    save_whisper(root / "target")
    target = load_target(TargetConfig(path=str(root / "target"), device="cpu"))
    drafter = near_copy(shallow(target.model, 1), 0.02, seed=1)
    drafter.config.target = {"path": str(root / "target"), "revision": None}
    drafter.save_pretrained(root / "drafter")
    target.tokenizer.save_pretrained(root / "drafter")
    export_to(root / "out", drafter=str(root / "drafter"), target="org/w", num_assistant_tokens=3)
    return root


def test_the_folder_is_a_causal_language_model_and_holds_no_code(folders):
    out = folders / "out"
    names = {file.name for file in out.rglob("*") if file.is_file()}
    assert names >= {"config.json", "model.safetensors", "policy.json", "README.md"}
    assert not (out / "custom_generate").exists()
    settings = json.loads((out / "config.json").read_text())
    assert settings["architectures"] == ["WhisperForCausalLM"]
    drafter = AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).get_vocab()
    assert drafter.generation_config.num_assistant_tokens == 3
    assert drafter.generation_config.num_assistant_tokens_schedule == "constant"
    assert drafter.generation_config.assistant_confidence_threshold == 0.0


def test_the_card_says_how_to_load_it_and_what_transformers_drops(folders):
    card = (folders / "out" / "README.md").read_text()
    assert 'drafter = AutoModelForCausalLM.from_pretrained("out")' in card
    assert "drops the target's `begin_suppress_tokens`" in card
    assert "decoder that reads its target's encoder" in card
    assert "custom_generate" not in card and "vLLM" not in card
    assert programs(AutoModelForCausalLM.from_pretrained(folders / "out").config) == ("assisted",)


def test_a_fresh_process_decodes_with_it_and_a_second_export_replaces_the_first(folders, capsys):
    asked = ["--drafter", folders / "drafter", "--out", folders / "second", "check=target"]
    assert ended("export", *asked) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"the target's output unchanged for {CLIPS} inputs" in said
    assert "assistant_model=AutoModelForCausalLM.from_pretrained(" in said
    card = (folders / "second" / "README.md").read_text()
    assert f"for {CLIPS} of {CLIPS} clips of noise" in card
    assert ended("export", *asked) == 2 and "add --force" in capsys.readouterr().err


def test_drafts_that_change_are_noticed(folders, tmp_path):
    parts = load_parts(ExportConfig(drafter=str(folders / "drafter"), out=tmp_path / "out"))

    def reload(folder: Path, reference: Path):
        model = AutoModelForCausalLM.from_pretrained(folders / "drafter")
        model.model.decoder.layers[0].encoder_attn.v_proj.weight.data.mul_(1.1)
        model.save_pretrained(tmp_path / "changed")
        parts.tokenizer.save_pretrained(tmp_path / "changed")
        (tmp_path / "changed" / "policy.json").write_bytes((folder / "policy.json").read_bytes())
        return compare(tmp_path / "changed", reference)

    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "policy.json").write_bytes((folders / "out" / "policy.json").read_bytes())
    with pytest.raises(ValueError, match="the drafter's weights changed"):
        verify(tmp_path / "whole", parts, Check(), reload)


def test_encodings_and_noise_are_the_same_every_time():
    target = tiny_model("whisper")
    ids = torch.tensor([3, 4])
    first, again = (made_up_encoding(shallow(target, 1), ids) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (12, 16)
    assert torch.equal(noise(target, 1), noise(target, 1))
    assert not torch.equal(noise(target, 0), noise(target, 1))


def broken(model: PreTrainedModel) -> PreTrainedModel:
    """A target that says something else where it is asked with an assistant."""
    usual = model.generate

    def generate(features, assistant_model=None, **settings):
        tokens = usual(features, **settings)
        return tokens if assistant_model is None else (tokens + 1) % 40

    model.generate = generate
    return model


def test_outputs_that_part_are_told_with_the_gap_between_the_targets_best_tokens():
    target = tiny_model("whisper")
    assert gaps_on_noise(target, shallow(target, 1), 8) == [None] * CLIPS
    gaps = gaps_on_noise(broken(tiny_model("whisper")), shallow(target, 1), 8)
    assert all(gap is not None and gap > 1e-3 for gap in gaps)
