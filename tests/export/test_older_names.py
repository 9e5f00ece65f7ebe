"""Names of Transformers 4 in an exported config.json, and what Transformers 5 makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, LlamaConfig

from drafttrain.export.older_names import older_names, write_older_names
from tests.export.pairs import export_to, save_drafter

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("rope", "names"),
    [
        (
            {"rope_type": "default", "rope_theta": 100000.0},
            {"rope_theta": 100000.0},
        ),
        (
            {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5},
            {"rope_theta": 7.0, "partial_rotary_factor": 0.5},
        ),
        (
            LLAMA3 | {"rope_theta": 500000.0},
            {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        ),
        ({"full_attention": {"rope_type": "default", "rope_theta": 5.0}}, {}),
        (None, {}),
    ],
)
def test_rotary_positions_have_both_names(rope, names):
    assert older_names({"rope_parameters": rope}) == names


def test_a_name_that_is_there_is_kept():
    rope = {"rope_type": "default", "rope_theta": 5.0}
    assert older_names({"rope_parameters": rope, "rope_theta": 6.0}) == {}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 100000.0},
        LLAMA3 | {"rope_theta": 500000.0},
    ],
)
def test_transformers_5_reads_what_it_wrote(tmp_path: Path, rope):
    LlamaConfig(rope_parameters=dict(rope)).save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    write_older_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == rope and again.to_dict() == before


def test_exports_say_it_in_both_ways(tmp_path: Path):
    out = export_to(tmp_path / "out", drafter=str(save_drafter(tmp_path / "drafter")))
    config = json.loads((out / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_models_without_rotary_positions_are_left_alone(tmp_path: Path):
    out = export_to(tmp_path / "out", drafter=str(save_drafter(tmp_path / "drafter", "gpt2")))
    config = json.loads((out / "config.json").read_text())
    assert "rope_theta" not in config and "rope_scaling" not in config
