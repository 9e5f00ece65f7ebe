"""A sweep expands one method into several."""

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.reading import validate_settings
from drafttrain.config.sweep import expand_sweep

METHOD = DecodeConfig.model_validate({"drafter": "d", "stop": {"k": 7}})


def test_no_sweep_is_the_method_itself_and_one_over_k_changes_nothing_else():
    assert expand_sweep(METHOD, {}) == [METHOD]
    found = expand_sweep(METHOD, {"k": [5, 10, 5.0]})
    assert [decode.stop.k for decode in found] == [5, 10]
    assert {(decode.drafter, decode.verifier.kind) for decode in found} == {("d", "auto")}


def test_beta_and_tau_add_spec_verification_at_each_pair_to_the_set_verifier():
    found = expand_sweep(METHOD, {"beta": [1, 3], "tau": [1, 2.5]})
    points = [(d.verifier.kind, d.verifier.beta, d.verifier.tau) for d in found[1:]]
    assert found[0] == METHOD
    assert points == [
        ("spec-verification", 1, 1.0),
        ("spec-verification", 1, 2.5),
        ("spec-verification", 3, 1.0),
        ("spec-verification", 3, 2.5),
    ]
    assert {decode.stop.k for decode in found} == {7}
    assert not found[0].verifier.model_fields_set & {"beta", "tau"}
    swept = expand_sweep(METHOD, {"k": [5, 10], "tau": [2]})
    kinds = ["auto", "spec-verification"]
    assert [(d.stop.k, d.verifier.kind) for d in swept] == [(k, r) for k in (5, 10) for r in kinds]


def test_settings_that_are_not_swept_are_taken_from_the_set_verifier_which_is_not_repeated():
    given = {"verifier": {"kind": "spec-verification", "beta": 5}}
    found = expand_sweep(DecodeConfig.model_validate(given), {"tau": [1, 2]})
    assert [(d.verifier.beta, d.verifier.tau) for d in found] == [(5, 1.0), (5, 2.0)]


def stops(decode: DecodeConfig, sweep: dict) -> list[tuple[str, dict]]:
    found = [method.stop.model_dump(exclude_unset=True) for method in expand_sweep(decode, sweep)]
    return [(stop.pop("kind", "fixed"), stop) for stop in found]


def test_every_swept_number_is_a_policy_of_its_own_kind():
    found = stops(METHOD, {"k": [2, 4], "h": [0.3, 0.7], "entropy": [1.5], "confidence": [0.4]})
    assert found == [
        ("fixed", {"k": 2}),
        ("fixed", {"k": 4}),
        ("head", {"h": 0.3}),
        ("head", {"h": 0.7}),
        ("entropy", {"entropy": 1.5}),
        ("confidence", {"confidence": 0.4}),
    ]


def test_a_policy_takes_only_its_own_settings_into_a_sweep():
    given = {"stop": {"k": 7, "head": "folder", "max_draft": 12}}
    found = stops(DecodeConfig.model_validate(given), {"k": [2], "h": [0.5], "entropy": [1.0]})
    assert found == [
        ("fixed", {"k": 2}),
        ("head", {"head": "folder", "max_draft": 12, "h": 0.5}),
        ("entropy", {"max_draft": 12, "entropy": 1.0}),
    ]


def test_the_set_policy_is_measured_in_a_sweep_over_others():
    head = {"stop": {"kind": "head", "h": 0.7, "head": "folder"}}
    found = stops(DecodeConfig.model_validate(head), {"k": [2, 4]})
    assert found[0] == ("head", {"h": 0.7, "head": "folder"})
    assert found[1:] == [("fixed", {"k": 2}), ("fixed", {"k": 4})]
    assert [h for _, h in stops(DecodeConfig.model_validate(head), {"h": [0.1, 0.3]})] == [
        {"h": 0.1, "head": "folder"},
        {"h": 0.3, "head": "folder"},
    ]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"k": [2.5]}, "stop.k = 2.5"),
        ({"k": [0]}, "stop.k = 0"),
        ({"tau": [-1]}, "tau = -1"),
        ({"h": [1.0]}, "h = 1"),
    ],
)
def test_impossible_sweeps_are_refused_by_name(sweep, message):
    with pytest.raises(ConfigError, match=message):
        expand_sweep(METHOD, sweep)


def test_a_sweep_names_settings_that_can_be_swept_and_has_values():
    with pytest.raises(ConfigError, match="sweep.bta.* = 'bta': Input should be .*'beta'"):
        validate_settings(EvalConfig, {"sweep": {"bta": [1]}})
    with pytest.raises(ConfigError, match=r"sweep.k = \[\]: List should have at least 1 item"):
        validate_settings(EvalConfig, {"sweep": {"k": []}})
