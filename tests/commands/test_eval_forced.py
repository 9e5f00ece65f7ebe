"""Acceptance along the target's own outputs on the command line: sweeps with other drafters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commanding import ended
from tests.small_pair import LENGTH, PAIR, methods_of, save_small_pair

QUICK = ["bootstrap=20", "timing_prompts=0", f"decode.sampling.max_new_tokens={LENGTH}"]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    return save_small_pair(tmp_path_factory.mktemp("forced-commands"))


def test_other_drafters_are_followed_at_every_k_of_a_sweep(inside, capsys):
    others = {
        "copied": {"drafter": "max-gram"},
        "itself": {"drafter": "llama"},
        "short": {"drafter": "small", "stop": {"k": 1}},
    }
    asked = ["--mode", "teacher-forced", "--sweep", "k=2,4", f"others={json.dumps(others)}"]
    assert ended("eval", *PAIR, *QUICK, *asked, "--report", "forced.json") == 0
    runs = methods_of(json.loads(Path("forced.json").read_text()))
    lengths = {name: (one["other"], one["settings"].get("k")) for name, one in runs.items()}
    assert lengths == {
        "causal k=2 greedy": (None, 2),
        "causal k=4 greedy": (None, 4),
        "copied k=2": ("copied", 2),
        "copied k=4": ("copied", 4),
        "itself k=2": ("itself", 2),
        "itself k=4": ("itself", 4),
        "short": ("short", 1),
    }
    found = {name: one["totals"] for name, one in runs.items()}
    assert len({totals["tokens"] for totals in found.values()}) == 1
    for k in (2, 4):  # the target accepts all of its own drafts
        rates = runs[f"itself k={k}"]["acceptance_rate_per_position"]["conditional"]
        assert [rate["value"] for rate in rates] == [1.0] * k
    rounds = [found[name]["rounds"] for name in ("itself k=4", "itself k=2", "short")]
    assert rounds == sorted(set(rounds))
    shown = capsys.readouterr().out
    assert all(name in shown for name in runs)
