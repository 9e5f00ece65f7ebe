"""Verifiers from settings, and from the policy.json of an export."""

from __future__ import annotations

import pytest

from drafttrain.build.method import check_method
from drafttrain.build.policy import dump_policy, is_lossy, verifier_config
from drafttrain.build.verifiers import build_verifier
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, TreeConfig, VerifierConfig
from drafttrain.config.policy import Policy
from drafttrain.decoding.types import Sampling

GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)
LENIENT = {"kind": "spec-verification", "beta": 5, "tau": 2.0}


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        ({}, "rejection"),
        ({"kind": "paths"}, "k-seq"),
        ({"kind": "paths", "drafters": ("another",)}, "multi-round"),
        ({"kind": "rsd-c"}, "recursive"),
        ({"kind": "rsd-s"}, "recursive"),
        ({"kind": "opt-tree"}, "target-walk"),
        ({"kind": "eagle"}, "target-walk"),
    ],
)
def test_auto_is_greedy_match_at_temperature_0_and_the_rule_of_the_drafts_above(tree, rule):
    config = TreeConfig(**tree)
    assert build_verifier(VerifierConfig(), GREEDY, config).name == "greedy"
    assert build_verifier(VerifierConfig(), SAMPLED, config).name == rule


def test_settings_reach_their_rule_and_no_other():
    assert build_verifier(VerifierConfig(**LENIENT), GREEDY).settings == {"beta": 5, "tau": 2.0}
    for kind in ("auto", "rejection"):
        with pytest.raises(ConfigError, match="verifier.tau = 2.0 counts for spec-verification"):
            build_verifier(VerifierConfig(kind=kind, tau=2.0), GREEDY)


def test_deferral_takes_a_rule_and_its_alpha_at_any_temperature():
    config = VerifierConfig(kind="deferral", rule="chow", alpha=0.2)
    for sampling in (GREEDY, SAMPLED):
        assert build_verifier(config, sampling).name == "deferral(chow,0.2)"
    with pytest.raises(ConfigError, match="verifier.alpha = 0.2 counts for deferral only"):
        build_verifier(VerifierConfig(alpha=0.2), GREEDY)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"drafter": "max-gram"}, "does not show any; draft with one trained model"),
        (
            {"drafter": "max-gram", "cascade": {"drafters": ("max-gram",)}},
            "|".join(("does not show any", "cascade")),
        ),
        ({"drafter": "max-gram", "tree": {"kind": "opt-tree"}}, "takes chains|tree"),
    ],
)
def test_deferral_is_refused_before_anything_loads_where_there_are_no_rows(method, message):
    for temperature in (0.0, 1.0):
        values = {**method, "verifier": {"kind": "deferral"},
                  "sampling": {"temperature": temperature}}  # fmt: skip
        with pytest.raises(ValueError, match=message):
            check_method(DecodeConfig.model_validate(values))


def policy(verifier: dict) -> Policy:
    return Policy(stop="fixed", k=3, verifier=verifier)


@pytest.mark.parametrize(
    ("verifier", "greedy", "sampled"),
    [
        ({}, "greedy", "rejection"),
        ({"kind": "greedy"}, "greedy", "rejection"),
        ({"kind": "rejection"}, "rejection", "rejection"),
        (LENIENT, "spec-verification(5,2.0)", "rejection"),
        ({"kind": "recursive"}, "greedy", "rejection"),
    ],
)
def test_a_policys_rule_gives_way_where_it_is_for_other_decoding(verifier, greedy, sampled):
    for sampling, name in ((GREEDY, greedy), (SAMPLED, sampled)):
        config = verifier_config(policy(verifier), sampling)
        assert build_verifier(config, sampling).name == name


def test_policy_json_holds_what_its_rule_and_its_stop_go_by():
    assert dump_policy(policy({})) == {"stop": "fixed", "k": 3, "verifier": {"kind": "auto"}}
    assert dump_policy(policy(LENIENT))["verifier"] == LENIENT
    assert [is_lossy(policy(one)) for one in ({}, LENIENT)] == [False, True]
