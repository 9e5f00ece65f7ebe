"""Cascades built from settings and used on the command line: levels, increments, costs, reports."""

import json
from pathlib import Path

import pytest

from drafttrain.build.drafts import level_names
from drafttrain.build.method import build_method
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import load_pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import CascadeConfig, DecodeConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.runs import fill_from_run
from tests.commanding import ended
from tests.export.pairs import noisy_copy
from tests.small_pair import SHORT, save_small_pair
from tests.tiny_targets import save_target


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = save_small_pair(tmp_path_factory.mktemp("cascades"))
    save_target(noisy_copy("llama", 0.1).float(), root / "base")
    return root


def report_of(*arguments: str) -> dict:
    pair = ["--target", "llama", "--drafter", "base", "--data", "texts.txt"]
    assert ended("eval", *pair, *SHORT, "--report", "report.json", *arguments) == 0
    return json.loads(Path("report.json").read_text())


CASCADE = ["--cascade", "small,max-gram", "--increments", "3,2,1/2,1/4"]


def test_a_cascade_on_the_command_line_gives_plain_output_and_counts_every_drafter(inside):
    _, found, *_ = report_of(*CASCADE, "--leniency", "1.5")["runs"]
    assert found["name"] == "cascade base>small>max-gram 3,2,1/2,1/4 l=1.5 k=6 greedy"
    assert found["lossless"]
    assert found["metrics"]["identical"]["value"] == 1.0
    calls, costs, totals = found["costs"]["calls"], found["costs"]["measured"], found["totals"]
    assert set(calls) == set(costs) == {"base", "small", "max-gram"}
    assert min(calls.values()) > 0
    assert totals["passes"] == calls["base"] + calls["small"]
    time = totals["rounds"] + sum(costs[name] * calls[name] for name in calls)
    assert found["metrics"]["swi"]["value"] == pytest.approx(totals["tokens"] / time)
    assert found["costs"]["parameters"] == {"base": 1.0, "small": 1.0, "max-gram": 0.0}
    size = totals["rounds"] + calls["base"] + calls["small"]
    assert found["metrics"]["mbsu"]["value"] == pytest.approx(totals["tokens"] / size)


def decode_config(**cascade) -> DecodeConfig:
    return DecodeConfig(drafter="base", cascade=CascadeConfig(**cascade))


def test_the_draft_length_is_the_expected_length_of_the_first_row(inside):
    decode = decode_config(drafters=("max-gram",), increments=((4, 3), (10,)))
    pair = load_pair(TargetConfig(path="llama"), *check_methods(decode))
    method = build_method(decode, pair)
    assert method.stop.longest == 7
    ratio = pair.drafter_model.num_parameters() / pair.target.model.num_parameters()
    assert method.parameter_ratios == {"base": ratio, "max-gram": 0.0}


def test_default_increments_ask_models_for_five_and_max_gram_for_ten_in_reviews():
    copied = CascadeConfig(drafters=("small", "max-gram"))
    assert copied.matrix() == ((5, 5, 0), (5, 10), (10,))
    assert CascadeConfig(drafters=("small",)).matrix() == ((5, 5), (5,))


def test_cascade_levels_have_distinct_names():
    runs = ["runs/a/final", "runs/b/final", "max-gram"]
    assert level_names(runs) == ["a", "b", "max-gram"]
    paths = ["one/drafter", "two/drafter", "max-gram"]
    assert level_names(paths) == paths


@pytest.mark.parametrize("again", ["base", "./base/"])
def test_a_level_is_not_given_twice(again):
    with pytest.raises(ConfigError, match="is twice in the cascade"):
        check_methods(decode_config(drafters=(again,)))


def test_without_a_drafter_and_a_run_for_the_target_max_gram_drafts(inside, capsys):
    values = fill_from_run({"target": {"path": "llama"}})
    assert values["decode"]["drafter"] == "max-gram"
    assert "no drafter is given: using max-gram" in capsys.readouterr().err


def test_other_methods_are_measured_in_the_same_run_under_their_names(inside):
    both = "{drafter: small, cascade: {drafters: max-gram, increments: '2,2/4'}}"
    others = ["others.copied.drafter=max-gram", "others.smaller={drafter: small, stop: {k: 3}}"]
    report = report_of("--k", "2", *others, f"others.both={both}")
    names = [run["name"] for run in report["runs"]]
    assert names == ["plain", "base k=2 greedy", "copied", "smaller", "both", "generate"]
    assert all(run["metrics"]["identical"]["value"] == 1.0 for run in report["runs"][1:])
    assert report["runs"][4]["costs"]["calls"].keys() == {"small", "max-gram"}
