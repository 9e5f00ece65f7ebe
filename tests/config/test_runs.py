"""Settings that commands take from policy.json, also by batch size, and from finished runs."""

import json
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.policy import Policy, dump_policy
from drafttrain.config.runs import fill_eval, fill_from_run, fill_generate

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
TREE = {"kind": "opt-tree", "nodes": 16}
GAIN = {"kind": "gain", "delta": 0.1, "max_draft": 6}
CASCADE = {"drafters": ["small", "max-gram"], "increments": [[5, 0, 0], [3, 0], [2]]}
FASTER = {
    "stop": "fixed",
    "k": 7,
    "sampling": {"temperature": 0.0},
    "method": {"tree": TREE, "stop": GAIN},
    "batches": {"4": {"stop": "fixed", "k": 3}, "8": {"stop": "fixed", "k": 2, "method": {}}},
}
FASTER["batches"]["8"]["method"] = {"cascade": CASCADE, "bigrams": "table"}


@pytest.fixture
def drafter(tmp_path) -> str:
    (tmp_path / "policy.json").write_text(json.dumps(CHOSEN))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("batch_size", "stop"),
    [
        (None, {"kind": "fixed", "k": 7}),
        (3, {"kind": "fixed", "k": 7}),
        (4, {"kind": "cumulative", "cumulative": 0.3, "max_draft": 9}),
        (15, {"kind": "cumulative", "cumulative": 0.3, "max_draft": 9}),
        ("32", {"kind": "fixed", "k": 2}),
    ],
)
def test_generate_takes_the_policy_of_its_batch_size(drafter, batch_size, stop):
    values = {"target": TARGET, "decode": {"drafter": drafter}}
    if batch_size is not None:
        values["batch_size"] = batch_size
    assert fill_from_run(values)["decode"]["stop"] == stop


def test_generate_drafts_nothing_where_plain_decoding_is_faster(tmp_path):
    policy = {"stop": "fixed", "k": 2, "batches": {4: {"stop": "fixed", "k": 2}}}
    policy["batches"][4]["speculate"] = False
    (tmp_path / "policy.json").write_text(json.dumps(policy))

    def decoded(fill=fill_generate, size: int = 8, **decode: object) -> tuple:
        values = {"target": TARGET, "decode": {"drafter": str(tmp_path), **decode}}
        found = fill(values | {"batch_size": size})["decode"]
        return found["drafter"], found["stop"].get("k")

    assert decoded() == ("none", None)
    assert decoded(size=3) == (str(tmp_path), 2)
    assert decoded(stop={"k": 7}) == (str(tmp_path), 7), "the user says how to draft"
    assert decoded(sampling={"temperature": 1.0}) == (str(tmp_path), 2), "it was chosen for greedy"
    assert decoded(fill_from_run) == (str(tmp_path), 2), "eval measures the drafter"


@pytest.mark.parametrize(
    ("decode", "verifier"),
    [
        ({"sampling": {"temperature": 1.0}}, {"kind": "block"}),
        ({}, {}),  # all names mean the same rule in greedy decoding
        ({"sampling": {"temperature": 1.0}, "tree": {"kind": "rsd-s"}}, {}),
        ({"sampling": {"temperature": 1}, "verifier": {"kind": "greedy"}}, {"kind": "greedy"}),
    ],
)
def test_a_policys_lossless_verifier_is_used_for_sampled_chains(drafter, decode, verifier):
    values = {"target": TARGET, "decode": {"drafter": drafter, **decode}}
    assert fill_from_run(values)["decode"].get("verifier", {}) == verifier


@pytest.mark.parametrize(
    ("decode", "counts"),
    [
        ({}, True),
        ({"sampling": {"temperature": 1.0}}, False),  # the policy is for greedy decoding
        ({"tree": {"kind": "opt-tree"}}, True),
        ({"verifier": {"kind": "greedy"}}, False),
    ],
)
def test_a_lossy_rule_is_used_wherever_it_fits_and_no_other_is_set(tmp_path, decode, counts):
    lossy = {"kind": "spec-verification", "beta": 3, "tau": 1.0}
    policy = {"stop": "fixed", "k": 3, "verifier": lossy}
    found = filled(tmp_path, policy, decode=decode).get("verifier") or {}
    assert (found == lossy) is counts


def filled(folder: Path, policy: dict, **values: object) -> dict:
    """Returns the decoding settings of `generate` or `eval` with the policy given by name."""
    file = folder / "chosen.json"
    file.write_text(json.dumps(policy))
    decode = {"drafter": str(folder), **values.pop("decode", {})}
    return fill_from_run({"target": TARGET, "policy": str(file), "decode": decode, **values})[
        "decode"
    ]


def test_the_faster_tree_or_cascade_of_a_policy_is_decoded_with(tmp_path):
    found = filled(tmp_path, FASTER)
    assert (found["tree"], found["stop"]) == (TREE, GAIN)
    found = filled(tmp_path, FASTER, batch_size=4)
    assert found["stop"] == {"kind": "fixed", "k": 3} and not found.get("tree")
    found = filled(tmp_path, FASTER, batch_size=8)
    assert found["cascade"] == CASCADE and found["bigrams"] == "table" and not found["stop"]


def test_a_stop_policy_of_chains_is_left_out_for_trees(tmp_path):
    assert filled(tmp_path, CHOSEN, decode={"tree": {"kind": "opt-tree"}})["stop"] == {}


@pytest.mark.parametrize(
    "values",
    [
        {"sweep": {"k": [2, 4]}},
        {"mode": "teacher-forced"},
        {"decode": {"stop": {"k": 4}}},
        {"decode": {"verifier": {"kind": "greedy"}}},
        {"decode": {"cascade": {"drafters": ["max-gram"]}}},
        {"decode": {"sampling": {"temperature": 1.0}}},  # chosen for greedy decoding
    ],
    ids=str,
)
def test_it_is_left_out_if_chains_or_other_drafts_are_set(tmp_path, values):
    found = filled(tmp_path, FASTER, **values)
    assert not found.get("tree") and found["stop"].get("kind", "fixed") == "fixed"


def test_a_policy_given_must_be_there(tmp_path):
    values = {"target": TARGET, "policy": "nowhere.json", "decode": {"drafter": str(tmp_path)}}
    with pytest.raises(ConfigError, match="nowhere.json.*No such file.*drafttrain tune"):
        fill_from_run(values)


def test_a_policy_is_written_as_it_was_read():
    policy = Policy.model_validate(FASTER)
    dumped = dump_policy(policy)
    assert dumped["method"] == FASTER["method"]
    assert dumped["batches"]["8"]["method"] == FASTER["batches"]["8"]["method"]
    assert Policy.model_validate(dumped) == policy


def finished_run(folder: Path) -> Path:
    """Makes the run folder of a Spec-Drafter with blocks of 7."""
    run = folder / "run"
    (run / "final").mkdir(parents=True)
    (run / "final" / "config.json").write_text('{"model_type": "spec-drafter"}')
    lines = ["run: run", "target: {path: t}", "data: {path: d.txt}", "drafter: {k: 7}"]
    (run / "run.yaml").write_text("\n".join(lines))
    return run


def test_a_run_among_other_methods_is_its_drafter(tmp_path):
    run = finished_run(tmp_path)
    others = {"mine": {"drafter": str(run)}, "copied": {"drafter": "max-gram"}}
    values = {"decode": {"drafter": "max-gram"}, "target": {"path": "t"}, "data": {"path": "d"}}
    found = fill_eval(values | {"others": others})["others"]
    assert found == {"mine": {"drafter": str(run / "final")}, "copied": {"drafter": "max-gram"}}


def test_a_runs_draft_length_is_the_default_of_fixed_lengths_only(tmp_path):
    run = finished_run(tmp_path)
    values = {"decode": {"drafter": str(run)}}
    assert fill_from_run(values)["decode"]["stop"] == {"k": 7}
    values["decode"]["stop"] = {"kind": "entropy"}
    assert fill_from_run(values)["decode"]["stop"] == {"kind": "entropy"}


def test_a_run_of_another_version_is_named_with_the_remedy(tmp_path):
    run = finished_run(tmp_path)
    with (run / "run.yaml").open("a") as file:
        file.write("\nlonger_ago: 1\nlong_ago: 2\n")
    with pytest.raises(ConfigError, match=r"run\.yaml.*'longer_ago', 'long_ago'.*remove these"):
        fill_from_run({"decode": {"drafter": str(run)}})


def test_an_export_records_its_target_and_draft_settings(drafter, capsys):
    made_for = {"path": "base", "revision": None, "takes_audio": False}
    Path(drafter, "config.json").write_text(json.dumps({"target": made_for}))
    found = fill_from_run({"decode": {"drafter": drafter}})
    assert (found["target"], found["decode"]["stop"]) == (
        {"path": "base"},
        {"kind": "fixed", "k": 7},
    )
    assert "was trained for target 'base'; give --target" in capsys.readouterr().err  # it was moved
    assert fill_from_run({"decode": {"drafter": drafter}, "target": TARGET})["target"] == TARGET
    Path(drafter, "config.json").write_text(json.dumps({"target": {"path": "org/base"}}))
    assert fill_from_run({"decode": {"drafter": drafter}})["target"] == {"path": "org/base"}
    assert capsys.readouterr().err == ""
