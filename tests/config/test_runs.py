"""Settings that commands take from policy.json, also by batch size, and from finished runs."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.policy import Policy, dump_policy
from drafttrain.config.reading import load_settings
from drafttrain.config.runs import fill_eval, fill_from_run, fill_generate, fill_tune, read_config

BATCHES = {"4": {"stop": "cumulative", "cumulative": 0.3, "max_draft": 9}}
BATCHES["16"] = {"stop": "fixed", "k": 2}
CHOSEN = {"stop": "fixed", "k": 7, "verifier": {"kind": "block"}, "batches": BATCHES}
TARGET = {"path": "target"}
TREE = {"kind": "opt-tree", "nodes": 16}
GAIN = {"kind": "gain", "delta": 0.1, "max_draft": 6}
CASCADE = {"drafters": ["small", "max-gram"], "increments": [[5, 0, 0], [3, 0], [2]]}
FASTER = {"stop": "fixed", "k": 7, "sampling": {"temperature": 0.0}}
FASTER["method"] = {"tree": TREE, "stop": GAIN}
FASTER["batches"] = {"4": {"stop": "fixed", "k": 3}, "8": {"stop": "fixed", "k": 2}}
FASTER["batches"]["8"]["method"] = {"cascade": CASCADE, "bigrams": "table"}


@pytest.fixture
def drafter(tmp_path) -> str:
    (tmp_path / "policy.json").write_text(json.dumps(CHOSEN))
    return str(tmp_path)


FIXED = {"kind": "fixed", "k": 7}
CUMULATIVE = {"kind": "cumulative", "cumulative": 0.3, "max_draft": 9}
SAMPLED = {"sampling": {"temperature": 1.0}}
OPT_TREE = {"tree": {"kind": "opt-tree"}}
MATCH, REJECTION = ({"verifier": {"kind": kind}} for kind in ("greedy", "rejection"))
LOSSY = {"kind": "spec-verification", "beta": 3, "tau": 1.0}
LENIENT = {"stop": "fixed", "k": 3, "verifier": LOSSY}
CHAINS = {"tree": {}}


@pytest.mark.parametrize(
    ("policy", "decode", "values", "expected"),
    [
        # the policy of the batch size
        (CHOSEN, {}, {}, {"stop": FIXED}),
        (CHOSEN, {}, {"batch_size": 3}, {"stop": FIXED}),
        (CHOSEN, {}, {"batch_size": 4}, {"stop": CUMULATIVE}),
        (CHOSEN, {}, {"batch_size": 15}, {"stop": CUMULATIVE}),
        (CHOSEN, {}, {"batch_size": "32"}, {"stop": {"kind": "fixed", "k": 2}}),
        (CHOSEN, {}, {"batch_size": "4.0"}, {"stop": CUMULATIVE}),
        # a lossless verifier is used for sampled chains; greedy, all names mean the same rule
        (CHOSEN, SAMPLED, {}, {"verifier": {"kind": "block"}}),
        (CHOSEN, {}, {}, {"verifier": {}}),
        (CHOSEN, SAMPLED | {"tree": {"kind": "rsd-s"}}, {}, {"verifier": {}}),
        (CHOSEN, SAMPLED | REJECTION, {}, REJECTION),
        (CHOSEN | {"verifier": {"kind": "recursive"}}, SAMPLED, {}, {"verifier": {}}),  # for trees
        # a lossy one, chosen for greedy decoding, wherever it fits and no other is set
        (LENIENT, {}, {}, {"verifier": LOSSY}),
        (LENIENT, OPT_TREE, {}, {"verifier": {}}),  # for chains only
        (LENIENT, SAMPLED, {}, {"verifier": {}}),
        (LENIENT, MATCH, {}, MATCH),
        # the faster tree or cascade, unless chains or other drafts are set
        (FASTER, {}, {}, {"tree": TREE, "stop": GAIN}),
        (FASTER, {}, {"batch_size": 4}, CHAINS | {"stop": {"kind": "fixed", "k": 3}}),
        (FASTER, {}, {"batch_size": 8}, {"cascade": CASCADE, "bigrams": "table", "stop": {}}),
        (FASTER, {}, {"sweep": {"k": [2, 4]}}, CHAINS),
        (FASTER, {}, {"mode": "teacher-forced"}, CHAINS | {"stop": FIXED}),
        (FASTER, {"stop": {"k": 4}}, {}, CHAINS | {"stop": {"k": 4}}),
        (FASTER, MATCH, {}, CHAINS),
        (FASTER, {"cascade": {"drafters": ["max-gram"]}}, {}, CHAINS),
        (FASTER, SAMPLED, {}, CHAINS),  # chosen for greedy decoding
        # stop policies of chains are left out for trees
        (CHOSEN, OPT_TREE, {}, {"stop": {}}),
    ],
)
def test_generate_and_eval_take_of_a_policy(tmp_path, policy, decode, values, expected):
    file = tmp_path / "chosen.json"
    file.write_text(json.dumps(policy))
    values |= {"target": TARGET, "decode": {"drafter": str(tmp_path), **decode}}
    found = fill_from_run(values | {"policy": str(file)})["decode"]
    assert {name: found.get(name) or {} for name in expected} == expected
    with pytest.raises(ConfigError, match="nowhere.json.*No such file.*drafttrain tune"):
        fill_from_run(values | {"policy": "nowhere.json"})


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
    others["same"] = {"verifier": {"kind": "block"}}
    values = {"decode": {"drafter": "max-gram"}, "target": {"path": "t"}, "data": {"path": "d"}}
    found = fill_eval(values | {"others": deepcopy(others)})["others"]
    assert found["mine"] == {"drafter": str(run / "final"), "stop": {"k": 7}}
    assert found["copied"] == others["copied"]
    assert found["same"] == {"drafter": "max-gram"} | others["same"]
    values["decode"] = {"drafter": str(run)}
    same = fill_eval(values | {"others": {"same": {"stop": {"k": 3}}}})["others"]["same"]
    assert same == {"drafter": str(run / "final"), "stop": {"k": 3}}


@pytest.mark.parametrize(("name", "stop"), [("max-gram", FIXED), ("none", {})])
def test_a_policy_never_replaces_a_given_drafter(tmp_path, monkeypatch, drafter, name, stop):
    finished_run(tmp_path / "checkpoints")
    monkeypatch.chdir(tmp_path)
    found = fill_from_run({"decode": {"drafter": name}, "policy": "policy.json"})
    decode = found["decode"]
    assert (decode["drafter"], decode.get("stop") or {}) == (name, stop)
    assert found["target"]["path"] == "t", "that of the newest run"


def test_a_tilde_in_the_names_of_models_is_expanded(tmp_path, monkeypatch):
    run = finished_run(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["target.path=~/t", "data.path=d.txt", "decode.drafter=~/run"]
    given += ["others={m: {drafter: ~/m, cascade: {drafters: [~/s, max-gram]}}}"]
    found = load_settings(EvalConfig, overrides=given, fill=fill_eval)
    assert (found.target.path, found.decode.drafter) == (f"{tmp_path}/t", str(run / "final"))
    assert found.others["m"].drafters == (f"{tmp_path}/m", f"{tmp_path}/s", "max-gram")


@pytest.mark.parametrize("target", ["t/", "./t"])
def test_a_run_is_found_by_any_spelling_of_its_targets_folder(tmp_path, monkeypatch, target):
    run = finished_run(tmp_path / "checkpoints")
    with (run / "run.yaml").open("a") as file:
        file.write("\nheld_out: {path: held.txt}\n")
    monkeypatch.chdir(tmp_path)
    found = fill_eval({"target": {"path": target}})
    assert found["decode"]["drafter"] == "checkpoints/run/final"
    assert found["data"]["path"] == "held.txt"


def test_a_runs_draft_length_is_the_default_of_fixed_lengths_only(tmp_path):
    run = finished_run(tmp_path)
    values = {"decode": {"drafter": str(run)}}
    assert fill_from_run(values)["decode"]["stop"] == {"k": 7}
    values["decode"]["stop"] = {"kind": "entropy"}
    assert fill_from_run(values)["decode"]["stop"] == {"kind": "entropy"}
    values["decode"] |= {"stop": {}, "tree": {"kind": "opt-tree"}}
    assert fill_from_run(values)["decode"]["stop"] == {}, "its default is the gain of a level"
    values["decode"]["tree"] = {"kind": "eagle"}
    assert fill_from_run(values)["decode"]["stop"] == {"k": 7}


def test_a_run_of_another_version_is_named_with_the_remedy(tmp_path):
    run = finished_run(tmp_path)
    with (run / "run.yaml").open("a") as file:
        file.write("\nlonger_ago: 1\nlong_ago: 2\n")
    with pytest.raises(ConfigError, match=r"run\.yaml.*'longer_ago', 'long_ago'.*remove these"):
        fill_from_run({"decode": {"drafter": str(run)}})


def test_an_unreadable_run_or_policy_stops_only_what_needs_it(tmp_path, monkeypatch, capsys):
    run = finished_run(tmp_path / "checkpoints")
    shutil.copytree(run, run.with_name("newer"))
    run.with_name("newer").joinpath("run.yaml").write_text("bogus: 1")
    monkeypatch.chdir(tmp_path)
    assert fill_from_run({"target": {"path": "t"}})["decode"]["drafter"].endswith("run/final")
    assert "skipped: checkpoints/newer/run.yaml: " in capsys.readouterr().err
    (run / "final" / "policy.json").write_text("{broken")
    values = {"drafter": str(run), "data": {"path": "d"}}
    assert fill_tune(values)["drafter"] == str(run / "final")
    with pytest.raises(ConfigError, match="no valid policy"):
        fill_from_run({"decode": {"drafter": str(run)}})


def test_an_export_records_its_target_and_draft_settings(drafter, capsys):
    Path(drafter, "config.json").write_text("[]")
    assert read_config(Path(drafter)) == {}, "it is no mapping"
    made_for = {"path": "base", "revision": None, "takes_audio": False}
    Path(drafter, "config.json").write_text(json.dumps({"target": made_for}))
    found = fill_from_run({"decode": {"drafter": drafter}})
    assert (found["target"], found["decode"]["stop"]) == ({"path": "base"}, FIXED)
    assert "was trained for target 'base'; give --target" in capsys.readouterr().err  # it was moved
    assert fill_from_run({"decode": {"drafter": drafter}, "target": TARGET})["target"] == TARGET
    Path(drafter, "config.json").write_text(json.dumps({"target": {"path": "org/base"}}))
    assert fill_from_run({"decode": {"drafter": drafter}})["target"] == {"path": "org/base"}
    assert capsys.readouterr().err == ""


def test_a_policy_and_heads_in_the_home_folder_are_found(drafter, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {"decode": {"drafter": "max-gram"}, "target": TARGET, "policy": "~/policy.json"}
    assert fill_from_run(values)["decode"]["stop"] == FIXED
    head = {"model_type": "acceptance-head", "sampling": {"temperature": 0.5}}
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(head))
    given = {"drafter": "max-gram", "target": TARGET, "data": {"path": "d"}, "heads": "~/head"}
    filled = fill_tune(given)
    assert filled["sampling"] == {"temperature": 0.5}
    assert filled["report"] == str(tmp_path / "head" / "tune.json")
