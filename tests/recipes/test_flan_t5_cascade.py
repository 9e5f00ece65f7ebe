"""The recipe of FLAN-T5 cascades: planned, and run with small models in place of the large ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commanding import ended
from tests.export.pairs import noisy_copy
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

RECIPE = Path(__file__).parents[2] / "recipes" / "flan_t5_cascade.yaml"
ROWS = [
    {"question": "w5 w6 w5", "answer": "w7", "choices": ["w1", "w2"]},
    {"question": "w9 w4 w9 w30", "answer": "w8", "choices": ["w3", "w4"]},
]


@pytest.fixture
def inside(tmp_path, monkeypatch) -> Path:
    save_target(tiny_model("t5").float(), tmp_path / "xxl")
    save_target(noisy_copy("t5", 0.1).float(), tmp_path / "base")
    save_target(noisy_copy("t5", 0.3).float(), tmp_path / "small")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def arguments(data: str) -> list[str]:
    decode = "{drafter: base, cascade: {drafters: [small, max-gram], increments: '7,10,0/1,0/10', "
    return [
        *("eval", "--config", str(RECIPE)),
        "target={path: xxl}",
        f"data={data}",
        decode.replace("{drafter", "decode={drafter", 1)
        + "leniency: 1.5}, sampling: {max_new_tokens: 16}}",
        "others.flan-t5-base.drafter=base",
        "others.flan-t5-small.drafter=small",
        "others={base: {drafter: base, stop: {k: 4}}, copied: {drafter: max-gram, stop: {k: 4}}}",
        *("repeats=1", "warmup=0", "bootstrap=20", "report=report.json"),
    ]


GSM8K = "{path: rows.jsonl, input_column: question, reference_column: answer}"
MMLU = '{path: rows.jsonl, template: "{question} {choices[0]} {choices[1]}"}'


def test_a_dry_run_says_what_would_be_measured_and_writes_nothing(inside, capsys):
    assert ended(*arguments(MMLU), "--dry-run") == 0
    said = capsys.readouterr().out
    assert "base > small > max-gram; increments 7,10,0/1,0/10; leniency 1.5" in said
    assert "rows.jsonl: 2 inputs" in said
    assert not Path("report.json").exists()


def test_small_models_in_place_of_the_large_ones_give_plain_output(inside):
    assert ended(*arguments(GSM8K)) == 0
    plain, *methods, _ = json.loads(Path("report.json").read_text())["runs"]
    assert plain["name"] == "plain"
    assert [method["name"] for method in methods][1:] == ["base", "copied"]
    assert all(method["metrics"]["identical"]["value"] == 1.0 for method in methods)
    assert methods[0]["costs"]["calls"]["small"] > 0
