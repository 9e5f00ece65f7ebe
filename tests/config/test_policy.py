"""policy.json at several batch sizes, and what commands take from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafttrain.config.filling import fill_distill, fill_from_run
from drafttrain.config.policy import Policy

CHOSEN = {
    "stop": "fixed",
    "k": 7,
    "verifier": {"kind": "block"},
    "batches": {
        "4": {"stop": "cumulative", "cumulative": 0.3, "max_draft": 9},
        "16": {"stop": "fixed", "k": 2},
    },
}
TARGET = {"path": "target"}


@pytest.fixture
def drafter(tmp_path: Path) -> str:
    (tmp_path / "policy.json").write_text(json.dumps(CHOSEN))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("batch_size", "stop"),
    [(1, "fixed"), (3, "fixed"), (4, "cumulative"), (15, "cumulative"), (64, "fixed")],
)
def test_a_policy_counts_up_to_the_next_measured_batch_size(batch_size, stop):
    policy = Policy.model_validate(CHOSEN).at(batch_size)
    assert policy.stop == stop
    assert policy.k == {3: 7, 1: 7, 64: 2}.get(batch_size)


@pytest.mark.parametrize(
    ("batch_size", "stop"),
    [
        (None, {"kind": "fixed", "k": 7}),
        (4, {"kind": "cumulative", "cumulative": 0.3, "max_draft": 9}),
        ("32", {"kind": "fixed", "k": 2}),
    ],
)
def test_generate_takes_the_policy_of_its_batch_size(drafter, batch_size, stop):
    values = {"target": TARGET, "decode": {"drafter": drafter}}
    if batch_size is not None:
        values["batch_size"] = batch_size
    assert fill_from_run(values)["decode"]["stop"] == stop


def test_distilling_takes_the_policy_of_its_rows(drafter):
    values = {"drafter": drafter, "batch_rows": 8}
    assert fill_distill(values)["stop"]["kind"] == "cumulative"


@pytest.mark.parametrize(
    ("decode", "verifier"),
    [
        ({"sampling": {"temperature": 1.0}}, {"kind": "block"}),
        ({}, {}),  # one rule is lossless in greedy decoding, whatever it is called
        ({"sampling": {"temperature": 1.0}, "tree": {"kind": "rsd-s"}}, {}),
        (
            {"sampling": {"temperature": 1.0}, "verifier": {"kind": "rejection"}},
            {"kind": "rejection"},
        ),
    ],
)
def test_a_lossless_rule_counts_where_chains_are_sampled(drafter, decode, verifier):
    values = {"target": TARGET, "decode": {"drafter": drafter, **decode}}
    assert fill_from_run(values)["decode"].get("verifier", {}) == verifier
