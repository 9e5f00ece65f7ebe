"""Stop policies and verifiers from settings, and from the policy.json of an export."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafttrain.build.method import build_stop, build_verifier
from drafttrain.build.pairing import check_methods
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, TreeConfig, VerifierConfig
from drafttrain.config.policy import Policy, dump_policy
from drafttrain.config.reading import validate_settings
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength, HeadJudge
from drafttrain.decoding.types import Sampling
from drafttrain.models.identity import hash_weights
from tests.export.pairs import save_head as saved_head
from tests.tiny_drafters import drafter_of
from tests.tiny_models import tiny_model


@pytest.fixture
def drafter(tmp_path) -> PreTrainedModel:
    """A tiny Llama in tmp_path/drafter, float32."""
    model = tiny_model("llama").float()
    model.save_pretrained(tmp_path / "drafter")
    return model


SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 1.0}
save_head = partial(saved_head, sampling=SAMPLING)


def decode(tmp_path: Path, stop: dict, **others) -> DecodeConfig:
    sampling = {"temperature": 0.8, "top_k": 50}
    values = {"drafter": str(tmp_path / "drafter"), "stop": stop, "sampling": sampling}
    return validate_settings(DecodeConfig, values | others)


def test_every_kind_is_built_with_its_own_numbers(tmp_path, drafter):
    head = str(save_head(tmp_path / "head", drafter))
    for given, stop, varied in (
        ({"k": 4}, FixedLength(4), "k"),
        ({"kind": "entropy", "entropy": 1.5, "max_draft": 7}, Entropy(1.5, 7), "entropy"),
        ({"kind": "confidence", "confidence": 0.3}, Confidence(0.3, 20), "confidence"),
    ):
        found = build_stop(decode(tmp_path, given), drafter)
        assert found == stop and found.rule.varied == varied
    policy = build_stop(decode(tmp_path, {"kind": "head", "head": head, "h": 0.4}), drafter)
    assert isinstance(policy.continues, HeadJudge)
    assert (policy.name, policy.longest) == ("head(0.4)", 20)
    assert (policy.rule.varied, policy.value) == ("h", 0.4)


def write_policy(folder: Path, **values) -> None:
    (folder / "policy.json").write_text(json.dumps({"stop": "head"} | values))


@pytest.mark.parametrize(
    ("policy", "stop", "found"),
    [
        (None, {}, (0.7, 20)),  # the paper's h
        ({"h": 0.35, "max_draft": 9}, {}, (0.35, 9)),
        ({"h": 0.35, "max_draft": 9}, {"h": 0.6, "max_draft": 5}, (0.6, 5)),
        ({"h": 0.35, "max_draft": 9, "head": "D4-w1"}, {}, (0.7, 20)),  # of another head
    ],
)
@pytest.mark.parametrize("place", [".", "acceptance_head"])
def test_h_and_the_cap_of_the_head_next_to_the_drafter(
    tmp_path, drafter, place, policy, stop, found
):
    save_head(tmp_path / "drafter" / "acceptance_head", drafter)
    if policy is not None:
        write_policy(tmp_path / "drafter" / place, **policy)
    chosen = build_stop(decode(tmp_path, {"kind": "head", **stop}), drafter)
    assert (chosen.value, chosen.longest) == found


def test_h_of_a_head_counts_where_a_fixed_length_was_better(tmp_path, drafter):
    final = tmp_path / "run" / "final"
    save_head(final / "D1-w6", drafter)
    write_policy(final, stop="fixed", k=3, head="D1-w6", h=0.25, max_draft=11)
    stop = {"kind": "head", "head": str(tmp_path / "run")}
    policy = build_stop(decode(tmp_path, stop), drafter)
    assert (policy.value, policy.longest) == (0.25, 11)


def test_policy_json_chooses_among_the_heads_of_a_run(tmp_path, drafter):
    for depth in (0, 2):
        save_head(tmp_path / f"run/final/D{depth}-w6", drafter, depth=depth)
    stop = {"kind": "head", "head": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="has 2 heads .D0-w6, D2-w6.*give the folder of one"):
        check_methods(decode(tmp_path, stop))
    write_policy(tmp_path / "run", h=0.2, head="D2-w6")
    chosen = build_stop(decode(tmp_path, stop), drafter)
    assert (chosen.continues.head.config.depth, chosen.value) == (2, 0.2)


def test_a_drafter_rounded_to_half_precision_is_still_the_same(tmp_path, drafter):
    head = str(save_head(tmp_path / "head", drafter))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "drafter", dtype=torch.bfloat16)
    assert hash_weights(half, torch.float32) != hash_weights(drafter)
    stop = build_stop(decode(tmp_path, {"kind": "head", "head": head}), half)
    assert stop.continues.head.dtype == torch.float32


def test_other_sampling_than_the_heads_is_reported_once_and_allowed(tmp_path, drafter, capsys):
    stop = {"kind": "head", "head": str(save_head(tmp_path / "head", drafter))}
    build_stop(decode(tmp_path, stop), drafter)
    assert warnings(capsys) == []
    for h in (0.3, 0.5):
        other = decode(tmp_path, stop | {"h": h}, sampling={"temperature": 1.0})
        build_stop(other, drafter)
    [line] = warnings(capsys)
    assert "trained for temperature 0.8, top_k 50, top_p 1" in line
    assert "decoding uses temperature 1, top_k 0, top_p 1" in line


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns our lines on standard error, without the libraries' progress bars."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if line.startswith("warning: ")]


def test_a_block_drafter_drafts_no_more_slots_than_it_was_trained_with(tmp_path):
    target = tiny_model("marian", tie_word_embeddings=True)
    model = drafter_of(target, k=6)
    assert build_stop(decode(tmp_path, {"kind": "entropy"}), model).longest == 6
    assert build_stop(decode(tmp_path, {"kind": "entropy", "max_draft": 8}), model).longest == 8


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
        verifier = VerifierConfig(kind=kind, tau=2.0)
        with pytest.raises(ConfigError, match="verifier.tau = 2.0 is for spec-verification"):
            check_methods(DecodeConfig(drafter="max-gram", verifier=verifier))


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
