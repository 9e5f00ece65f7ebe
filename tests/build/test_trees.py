"""Draft trees from settings: what is built and refused, and that outputs stay exact."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from drafttrain.build.drafts import tree_settings
from drafttrain.build.method import build_method
from drafttrain.build.pairing import check_methods, method_stop
from drafttrain.build.pairs import Pair, load_pair
from drafttrain.config.decode import DecodeConfig, TreeConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.reading import validate_settings
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.stopping import FixedLength, Gain
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths
from drafttrain.decoding.trees.fixed import Fixed
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from tests.export.pairs import noisy_copy, save_spec_drafter
from tests.tiny_models import tiny_model
from tests.tiny_targets import save_target

SAMPLED = {"temperature": 1.0, "top_k": 20}


@dataclass(frozen=True)
class Folders:
    """Pairs on disk: decoder-only with a second drafter and heads, encoder-decoder with slots."""

    root: Path

    def decode(self, tree: dict, **groups: object) -> DecodeConfig:
        values = {"drafter": str(self.root / "small"), "tree": tree} | groups
        return validate_settings(DecodeConfig, values)

    def pair(self, decode: DecodeConfig) -> Pair:
        large = "marian" if "slots" in str(decode.drafter) else "llama"
        target = TargetConfig(path=str(self.root / large), device="cpu", dtype="float32")
        return load_pair(target, decode.drafters)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Folders:
    root = tmp_path_factory.mktemp("trees")
    save_target(tiny_model("llama").float(), root / "llama")
    small = noisy_copy("llama", 0.5).float()
    save_target(small, root / "small")
    save_target(noisy_copy("llama", 1.0).float(), root / "other")
    marian = tiny_model("marian").float()
    save_target(marian, root / "marian")
    slots = str(save_spec_drafter(root / "slots", marian, root / "marian"))
    block_drafter = load_drafter(slots, read_drafter_settings(slots)).float()
    block_drafter.save_pretrained(slots)
    return Folders(root)


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
def test_a_tree_has_the_requested_shape_and_its_own_rule(folders, kind):
    settings, shape, rule = TREES[kind]
    decode = folders.decode(settings, sampling=SAMPLED)
    check_methods(decode)
    method = build_method(decode, folders.pair(decode))
    assert isinstance(method.drafter, TreeDrafter)
    assert method.drafter.shape == shape
    assert method.verifier.name == rule and method.verifier.lossless
    if kind in ("paths", "rsd-s"):  # drawn for a greedy target
        decode = folders.decode(settings | {"draft_temperature": 0.6})
        method = build_method(decode, folders.pair(decode))
        assert (method.verifier.name, method.drafter.draft_temperature) == ("greedy", 0.6)


def test_an_opt_tree_stops_by_gain_unless_a_length_or_a_policy_is_given(folders):
    def stop(tree: dict, **given: object):
        decode = folders.decode(tree, stop=given)
        return build_method(decode, folders.pair(decode)).stop

    assert stop({"kind": "opt-tree"}) == Gain(0.2, 20)
    assert stop({"kind": "opt-tree"}, delta=0.4, max_draft=6) == Gain(0.4, 6)
    assert stop({"kind": "opt-tree"}, k=3) == FixedLength(3)
    assert stop({"kind": "opt-tree"}, kind="fixed") == FixedLength(10)
    assert stop({"kind": "binary"}) == FixedLength(10)
    assert method_stop(folders.decode({"kind": "none"})).kind == "fixed"


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


def test_several_drafters_draft_side_by_side(folders):
    other = str(folders.root / "other")
    decode = folders.decode(
        {"kind": "paths", "width": 2, "drafters": [other]}, sampling=SAMPLED, stop={"k": 2}
    )
    check_methods(decode)
    method = build_method(decode, folders.pair(decode))
    assert isinstance(method.drafter, SeveralDrafters)
    assert (method.drafter.name, method.verifier.name) == ("paths(2)+paths(2)", "multi-round")
    assert method.sizes == {"depth": 2, "nodes": 8}
