"""Verifiers from settings, and from the policy.json of an export."""

import pytest

from drafttrain.build.method import build_verifier
from drafttrain.build.pairing import check_methods
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, TreeConfig, VerifierConfig
from drafttrain.config.policy import Policy, dump_policy
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
        decode = DecodeConfig(drafter="max-gram", verifier=VerifierConfig(kind=kind, tau=2.0))
        with pytest.raises(ConfigError, match="verifier.tau = 2.0 is for spec-verification"):
            check_methods(decode)


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
        config = policy(verifier).verifier_for(sampling.greedy)
        assert build_verifier(config, sampling).name == name


def test_policy_json_has_verifier_and_stop_settings():
    assert dump_policy(policy({})) == {"stop": "fixed", "k": 3, "verifier": {"kind": "auto"}}
    assert dump_policy(policy(LENIENT))["verifier"] == LENIENT
    assert [policy(one).lossy for one in ({}, LENIENT)] == [False, True]
