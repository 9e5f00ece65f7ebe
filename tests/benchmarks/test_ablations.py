"""Variants are trained once, measured, compared sentence by sentence, and kept."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.tiny_drafters import shared
from tests.tiny_targets import random_sentences, save_target

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ablations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    return importlib.import_module("ablations")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A baseline and two variants on 24 sentences, with 6 held out: 2 validate, 4 measure."""
    target = save_target(shared("marian"), tmp_path / "target")
    for name, count in (("train", 24), ("train.de", 24), ("val", 6)):
        (tmp_path / f"{name}.txt").write_text("\n".join(random_sentences(count)) + "\n")
    recipe = {
        "run": str(tmp_path / "run"),
        "target": {"path": str(target)},
        "data": {
            "path": str(tmp_path / "train.txt"),
            "reference_path": str(tmp_path / "train.de.txt"),
        },
        "held_out": {"path": str(tmp_path / "val.txt")},
        "validation_rows": 2,
        "distill": {"sampling": {"max_new_tokens": 8}},
        "drafter": {"k": 3, "decoder_layers": 1},
        "train": {"batch_tokens": 300},
    }
    plan = {
        "common": ["train.learning_rate=1e-3"],
        "baseline": "baseline",
        "variants": {
            "baseline": {"k": [2, 3], "temperature": [1.0]},
            "total-variation": {"settings": ["objective.total_variation=1"]},
            "references": {"outputs": "references"},
        },
    }
    for name, values in (("recipe", recipe), ("plan", plan)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    files = ["--config", str(tmp_path / "recipe.yaml"), "--plan", str(tmp_path / "plan.yaml")]
    return [*files, "--out", str(tmp_path / "out"), "--seconds", "0.2", "--timed", "2"]


def run(ablations: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ablations.py", *arguments])
    ablations.main()


def test_variants_are_trained_once_and_measured_on_sentences_of_their_own(
    ablations: ModuleType,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(ablations, monkeypatch, arguments)
    out = tmp_path / "out"
    report = json.loads((out / "ablations.json").read_text())
    assert list(report) == ["baseline", "total-variation", "references"]
    cases = report["baseline"]["measured"]["cases"]
    assert [(case["k"], case["temperature"]) for case in cases] == [(2, 0.0), (3, 0.0), (3, 1.0)]
    assert all(len(case["tokens"]) == 4 for case in cases)  # 6 held out, 2 of them validate
    assert cases[0]["identical"] == 1.0
    assert len((out / "ablations.md").read_text().splitlines()) == 2 + 5
    trained = {name: (out / name / "trained.json").stat().st_mtime_ns for name in report}
    run(ablations, monkeypatch, arguments)
    assert {name: (out / name / "trained.json").stat().st_mtime_ns for name in report} == trained
    with pytest.raises(SystemExit, match="baseline was trained with other settings"):
        run(ablations, monkeypatch, [*arguments, "drafter.dropout=0.3"])


def test_differences_are_paired_sentence_by_sentence(ablations: ModuleType) -> None:
    """The same 0.5 tokens a round more on every sentence: no doubt, however much they vary."""
    tables = importlib.import_module("ablation_tables")

    def case(tokens: list[int]) -> object:
        return tables.Case.model_construct(tokens=tokens, rounds=[2, 2, 2, 2])

    more, fewer = case([5, 9, 3, 21]), case([4, 8, 2, 20])
    assert tables.mean_acceptance_length(more).value == pytest.approx(38 / 8)
    found = tables.rate_difference(more, fewer)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    assert tables.signed(found).endswith("*")
    assert "*" not in tables.signed(tables.rate_difference(more, case([5, 9, 4, 20])))
