"""Draft trees from settings: what is built and refused, and that outputs stay exact."""

import contextlib
from pathlib import Path

import pytest

from drafttrain.build.drafts import tree_settings
from drafttrain.build.method import Method, build_method, make_stop
from drafttrain.build.pairing import check_methods, method_stop
from drafttrain.build.pairs import Pair, load_pair
from drafttrain.config.decode import DecodeConfig, TreeConfig
from drafttrain.config.reading import validate_settings
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.stopping import FixedLength, Gain
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths
from drafttrain.decoding.trees.fixed import Fixed
from tests.export.pairs import noisy_copy
from tests.small_pair import save_small_pair
from tests.tiny_targets import save_target, target_at

SAMPLED = {"temperature": 1.0, "top_k": 20}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    root = save_small_pair(tmp_path_factory.mktemp("trees"))
    save_target(noisy_copy("llama", 1.0).float(), root / "other")
    return root


@pytest.fixture(scope="module")
def pair(project) -> Pair:
    with contextlib.chdir(project):
        return load_pair(target_at("llama"), ["small", "other"])


def method_of(tree: dict, **groups: object) -> DecodeConfig:
    return validate_settings(DecodeConfig, {"drafter": "small", "tree": tree} | groups)


def built(pair: Pair, tree: dict, **groups: object) -> Method:
    """Builds the method of a tree; the working directory is that of the pair."""
    decode = method_of(tree, **groups)
    check_methods(decode)
    return build_method(decode, pair)


TREES = {
    "paths": ({"kind": "paths", "width": 4}, Paths(4), "k-seq"),
    "rsd-c": ({"kind": "rsd-c", "branching": (3, 1)}, Branching((3, 1)), "recursive"),
    "rsd-s": ({"kind": "rsd-s", "width": 5}, Beam(5), "recursive"),
    "opt-tree": ({"kind": "opt-tree", "nodes": 9}, Optimal(9), "target-walk"),
    "binary": (
        {"kind": "binary", "nodes": 3},
        Fixed(frozenset({(0,), (1,), (0, 0)}), "binary"),
        "target-walk",
    ),
    "sequoia": (
        {"kind": "sequoia", "nodes": 4, "by_rank": (0.6, 0.3)},  # .6 .36 .3 .216
        Fixed(frozenset({(0,), (1,), (0, 0), (0, 0, 0)}), "sequoia"),
        "target-walk",
    ),
}


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_has_the_requested_shape_and_its_own_rule(inside, pair, kind):
    settings, shape, rule = TREES[kind]
    method = built(pair, settings, sampling=SAMPLED)
    assert isinstance(method.drafter, TreeDrafter)
    assert method.drafter.shape == shape
    assert method.verifier.name == rule and method.verifier.lossless
    if kind in ("paths", "rsd-s"):  # drawn for a greedy target
        method = built(pair, settings | {"draft_temperature": 0.6})
        assert (method.verifier.name, method.drafter.draft_temperature) == ("greedy", 0.6)


@pytest.mark.parametrize(
    ("tree", "given", "stop"),
    [
        ("opt-tree", {}, Gain(0.2, 20)),
        ("opt-tree", {"delta": 0.4, "max_draft": 6}, Gain(0.4, 6)),
        ("opt-tree", {"k": 3}, FixedLength(3)),
        ("opt-tree", {"kind": "fixed"}, FixedLength(10)),
        ("binary", {}, FixedLength(10)),
        ("none", {"k": 4}, FixedLength(4)),
    ],
)
def test_an_opt_tree_stops_by_gain_unless_a_length_or_a_policy_is_given(tree, given, stop):
    assert make_stop(method_stop(method_of({"kind": tree}, stop=given))) == stop


@pytest.mark.parametrize(
    ("tree", "depth", "size"),
    [
        (TreeConfig(), 4, (4, 4)),
        (TreeConfig(kind="paths", width=3, drafters=("a", "b")), 4, (4, 36)),
        (TreeConfig(kind="rsd-c", branching=(3, 2, 1)), 5, (3, 3 + 6 + 6)),
        (TreeConfig(kind="opt-tree", nodes=14), 20, (20, 14)),
        (TreeConfig(kind="binary", nodes=14), 10, (3, 14)),
        (TreeConfig(kind="eagle"), 10, (5, 25)),
        (TreeConfig(kind="sequoia", nodes=3, by_rank=(0.9,)), 10, (3, 3)),
    ],
    ids=lambda value: value.kind if isinstance(value, TreeConfig) else None,
)
def test_reports_name_the_depth_and_the_tokens_of_a_tree(tree, depth, size):
    assert tuple(tree_settings(tree, depth).values()) == size


def test_several_drafters_draft_side_by_side(inside, pair):
    tree = {"kind": "paths", "width": 2, "drafters": ["other"]}
    method = built(pair, tree, sampling=SAMPLED, stop={"k": 2})
    assert isinstance(method.drafter, SeveralDrafters)
    assert (method.drafter.name, method.verifier.name) == ("paths(2)+paths(2)", "multi-round")
    assert method.sizes == {"depth": 2, "nodes": 8}
