"""The tables of kinds agree with the code that they name."""

import inspect
from pkgutil import resolve_name

import pytest
import torch

from drafttrain.config.commands import DistillConfig
from drafttrain.config.decode import StopConfig, TreeConfig, VerifierConfig
from drafttrain.config.kinds import CAUSAL, KINDS, NONE, kind_of, named_kind
from drafttrain.config.methods import RULES, STOPS, TREES, rules_for
from drafttrain.data.distill.distill import BACKENDS
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.block_heads import BlockHeadsDrafter
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.parallel import ParallelDrafter
from drafttrain.decoding.drafters.state import TargetStatesDrafter
from drafttrain.decoding.types import DraftState, Sampling
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig
from tests.tiny_drafters import small_drafter
from tests.tiny_models import tiny_model

DRAFTERS = (NoDrafter, MaxGramDrafter, BlockDrafter, BlockHeadsDrafter)
DRAFTERS += (TargetStatesDrafter, ParallelDrafter, CausalDrafter)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)
def test_a_drafter_provides_what_its_kind_lists(drafter):
    kind, made = KINDS[drafter.name], object.__new__(drafter)  # neither depends on a model
    assert made.provides == kind.provides
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        assert made.draw_kind(sampling) == kind.draw_kind(sampling.greedy)


def test_every_drafter_kind_exists():
    assert {drafter.name for drafter in DRAFTERS} == KINDS.keys()
    for kind in KINDS.values():
        named = [kind.opens, kind.model, kind.recipe, kind.checks]
        for name in filter(None, [*named, kind.tree_rows, kind.teacher_forced_probs]):
            assert callable(resolve_name(name))
        if kind.model is not None:
            known = getattr(resolve_name(kind.model), "config_class", None)
            assert kind.marked_by or known.model_type == kind.name


def test_a_backend_names_what_is_there_and_auto_is_one_of_them():
    for opens in BACKENDS.values():
        assert callable(resolve_name(f"drafttrain.data.distill.{opens}"))
    needed = {"target": {"path": "t"}, "data": {"path": "d"}, "out": "o"}
    served = DistillConfig(**needed, server={"url": "localhost:8000"})
    assert served.decoded_by == "server"
    assert DistillConfig(**needed).decoded_by == "transformers"
    assert DistillConfig(**needed, backend="engine").decoded_by == "engine"


def test_any_language_model_is_a_causal_drafter():
    assert kind_of(tiny_model("llama").config) is kind_of(tiny_model("t5").config) is CAUSAL
    assert kind_of(small_drafter(4, 8, 3).config) is KINDS["spec-drafter"]
    assert named_kind("none") is NONE
    assert named_kind("causal") is named_kind("spec-drafter") is named_kind(None) is None


@pytest.mark.parametrize("stop", STOPS.values(), ids=lambda stop: stop.name)
def test_a_stop_policy_has_the_settings_and_inputs_of_its_row(stop):
    assert set(stop.settings) <= StopConfig.model_fields.keys()
    assert stop.varied in stop.settings and stop.settings[-1] in ("k", "max_draft")
    goes_on = resolve_name(stop.function)
    if stop.reads_head:
        goes_on = goes_on(AcceptanceHead(AcceptanceHeadConfig(hidden_size=4, depth=0)))
    state = Watched(DraftState(1, [torch.zeros(3)], [torch.zeros(4)], expected=[0.5]))
    assert goes_on(state, 0.5) in (True, False)
    assert state.seen - {"depth", "notes"} == stop.requires


class Watched:
    """A state that records which of its fields are read."""

    def __init__(self, state: DraftState) -> None:
        self.state, self.seen = state, set()

    def __getattr__(self, name: str) -> object:
        self.seen.add(name)
        return getattr(self.state, name)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_a_verifier_takes_its_settings(rule):
    taken = list(inspect.signature(resolve_name(rule.function)).parameters)
    assert taken[:4] == ["proposal", "target_logits", "sampling", "randomness"]
    assert tuple(taken[4:]) == rule.settings
    defaults = {name: getattr(VerifierConfig(), name) for name in rule.settings}
    assert rule.lossless or rule.accepts.format(**defaults)


@pytest.mark.parametrize("tree", TREES.values(), ids=lambda tree: tree.name)
def test_a_tree_has_the_draw_and_verifier_of_its_row(tree):
    settings = TreeConfig(kind=tree.name, by_rank=(0.6, 0.2), nodes=6)
    assert set(tree.settings) <= TreeConfig.model_fields.keys()
    assert tree.rule in rules_for(tree.draw_kind, tree.shape is not None)
    if tree.rule_of_several is not None:
        assert tree.rule_of_several in rules_for("independent", True)
    if tree.shape is not None:
        values = {**dict(settings), "depth": 3}
        shape = resolve_name(tree.shape)(*(values[name] for name in tree.arguments))
        assert shape.draw_kind == tree.draw_kind
        assert shape.estimates == ("expected" in tree.provides)


def test_every_way_to_draw_has_a_rule_that_keeps_the_targets_law():
    for draw_kind in ("deterministic", "iid", "independent", "without_replacement"):
        for drafts_trees in (False, True):
            rules = [RULES[name] for name in rules_for(draw_kind, drafts_trees)]
            assert any(rule.lossless for rule in rules)
    assert rules_for("iid", drafts_trees=False) == ["rejection", "block"]
