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


HEAD = {"kind": "head", "h": 0.7, "head": "folder"}


@pytest.mark.parametrize(
    ("stop", "sweep", "expected"),
    [
        # every swept number is a policy of its own kind
        (
            {"k": 7},
            {"k": [2, 4], "h": [0.3], "entropy": [1.5], "confidence": [0.4]},
            {"fixed": [{"k": 2}, {"k": 4}], "head": [{"h": 0.3}], "entropy": [{"entropy": 1.5}]}
            | {"confidence": [{"confidence": 0.4}]},
        ),
        # it takes only its own settings
        (
            {"k": 7, "head": "folder", "max_draft": 12},
            {"k": [2], "h": [0.5], "entropy": [1.0]},
            {
                "fixed": [{"k": 2}],
                "head": [{"head": "folder", "max_draft": 12, "h": 0.5}],
                "entropy": [{"max_draft": 12, "entropy": 1.0}],
            },
        ),
        # the set policy is measured in a sweep over others
        (HEAD, {"k": [2]}, {"head": [{"h": 0.7, "head": "folder"}], "fixed": [{"k": 2}]}),
        (HEAD, {"h": [0.1, 0.3]}, {"head": [{"h": h, "head": "folder"} for h in (0.1, 0.3)]}),
    ],
)
def test_a_sweep_over_stop_policies(stop, sweep, expected):
    found: dict[str, list[dict]] = {}
    for decode in expand_sweep(DecodeConfig.model_validate({"stop": stop}), sweep):
        settings = decode.stop.model_dump(exclude_unset=True, exclude={"kind"})
        found.setdefault(decode.stop.kind, []).append(settings)
    assert found == expected and [*found] == [*expected]


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
