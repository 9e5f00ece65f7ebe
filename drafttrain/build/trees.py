"""Draft trees from settings: shapes, the drafters that grow them, the rule that verifies them."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.config.decode import TREE_SETTINGS, DecodeConfig, StopConfig, TreeConfig
from drafttrain.config.base import ConfigError
from drafttrain.decoding.trees.chosen import (Fixed, Optimal, best_fixed_tree, binary_tree, eagle_tree,)
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter, check_width
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths
from drafttrain.decoding.trees.shapes import Judge, Shape
from drafttrain.decoding.types import Drafter
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.block_heads import BlockHeadsConfig
from drafttrain.models.draft_states import drawn_states
from drafttrain.models.drafters import drafts_blocks, read_drafter_settings
from drafttrain.build.pairs import Pair
from drafttrain.config.runs import MAX_GRAM, MODEL_FREE
from drafttrain.build.stops import find_head, open_head, warn_of_other_sampling

DRAWN = ("paths", "rsd-c", "rsd-s")
"""Kinds of trees whose tokens are drawn."""
RULES = {"none": "rejection", "paths": "k-seq", "rsd-c": "recursive", "rsd-s": "recursive"}
"""The verifier of sampled decoding; target-walk for the other trees."""


def check_tree(decode: DecodeConfig) -> None:
    """Refuse a tree that cannot be right, before any large model is loaded.

    Raises ConfigError for settings that another kind of tree goes by, for a tree without a drafter,
    for drawn trees at temperature 0, for more siblings than there are tokens, for a sequoia tree
    without acceptance by rank, and for a head that cannot score nodes.
    """
    tree = decode.tree
    for name in sorted(tree.model_fields_set - TREE_SETTINGS[tree.kind] - {"kind"}):
        kinds = [kind for kind, used in TREE_SETTINGS.items() if name in used]
        raise ConfigError(
            f"tree.{name} = {getattr(tree, name)} counts for {' or '.join(kinds)} only, but the "
            f"tree is {tree.kind!r}; leave it out, or set tree.kind={kinds[0]}"
        )
    if tree.kind == "none":
        return
    if decode.drafter in MODEL_FREE:
        raise ConfigError(
            f"tree.kind = {tree.kind!r}, but drafter {decode.drafter!r} has no rows to grow a tree "
            "from; give a trained drafter"
        )
    if tree.kind in DRAWN and decode.sampling.temperature == 0 and tree.draft_temperature is None:
        raise ConfigError(
            f"tree.kind = {tree.kind!r} draws its tokens, but at temperature 0 all draws are the "
            "same; set tree.draft_temperature=1, or use opt-tree or a fixed tree"
        )
    shape = build_shape(tree, decode.stop.k)
    settings = read_drafter_settings(str(decode.drafter))
    if isinstance(settings, BlockHeadsConfig):
        raise ConfigError(
            f"tree.kind = {tree.kind!r}, but drafter {decode.drafter!r} holds block heads, which "
            "draft chains; leave the tree out, or give a Spec-Drafter or a language model"
        )
    check_width(shape, settings.get_text_config(decoder=True).vocab_size)
    if tree.head is not None:
        _find_judge(decode, settings)


def check_companions(tree: TreeConfig) -> None:
    """Raise ConfigError for drafters side by side that are no language models."""
    for name in tree.drafters:
        settings = None if name == MAX_GRAM else read_drafter_settings(name)
        if settings is None or drafts_blocks(settings):
            kind = MAX_GRAM if settings is None else f"of kind {settings.model_type}"
            raise ConfigError(
                f"tree.drafters = {name!r} is {kind}; paths of several drafters are drawn by "
                "language models; give one, or use it alone"
            )


def tree_stop(decode: DecodeConfig) -> StopConfig:
    """The stop policy asked for; an opt-tree without one stops by the gain of its levels."""
    given = decode.stop.model_fields_set
    if decode.tree.kind != "opt-tree" or given & {"kind", "k"}:
        return decode.stop
    return StopConfig(kind="gain", **decode.stop.model_dump(exclude_unset=True))


def default_rule(tree: TreeConfig) -> str:
    """What verifies these drafts where tokens are sampled."""
    return "multi-round" if tree.drafters else RULES.get(tree.kind, "target-walk")


def build_shape(tree: TreeConfig, depth: int, judge: Judge | None = None) -> Shape:
    """The shape of the trees. Raises ConfigError where acceptance by rank is missing."""
    if tree.kind == "sequoia" and tree.by_rank is None:
        raise ConfigError(
            "tree.by_rank is missing for a sequoia tree; give the shares, or let `drafttrain eval` "
            "measure them: rank_data.path=PROMPTS (not those reported on)"
        )
    shapes: dict[str, Callable[[], Shape]] = {
        "paths": lambda: Paths(tree.width),
        "rsd-c": lambda: Branching(tree.branching),
        "rsd-s": lambda: Beam(tree.width),
        "opt-tree": lambda: Optimal(tree.nodes, judge),
        "binary": lambda: binary_tree(tree.nodes),
        "eagle": eagle_tree,
        "sequoia": lambda: best_fixed_tree(tree.by_rank or (), tree.nodes, depth),
    }
    return shapes[tree.kind]()


def tree_settings(tree: TreeConfig, depth: int) -> dict[str, float]:
    """Most levels and tokens of the trees, by which methods are compared."""
    sizes: dict[str, Callable[[], int]] = {
        "none": lambda: depth,
        "paths": lambda: tree.width * depth * (1 + len(tree.drafters)),
        "rsd-c": lambda: sum(prod(tree.branching[: i + 1]) for i in range(len(tree.branching))),
        "rsd-s": lambda: tree.width * depth,
        "eagle": lambda: 25,
    }
    if tree.kind == "rsd-c":
        depth = min(depth, len(tree.branching))
    nodes = sizes.get(tree.kind, lambda: tree.nodes)()
    shape = None if tree.kind not in ("binary", "eagle", "sequoia") else build_shape(tree, depth)
    if isinstance(shape, Fixed):
        depth = min(depth, max(map(len, shape.paths)))
    return {"depth": float(depth), "nodes": float(nodes)}


def build_drafter(decode: DecodeConfig, pair: Pair) -> Drafter:
    """The pair's drafter, growing the trees asked for.

    Raises ValueError where the drafter cannot be given branches, or for a tree wider than its
    vocabulary.
    """
    tree, drafter = decode.tree, pair.drafter
    if tree.kind == "none":
        return drafter
    assert isinstance(drafter, CausalDrafter | BlockDrafter)
    shape = build_shape(tree, decode.stop.k, _open_judge(decode, pair))
    first = TreeDrafter(drafter, shape, tree.draft_temperature)
    if not tree.drafters:
        return first
    others = [pair.companions[name] for name in tree.drafters]
    return SeveralDrafters(
        [first, *(TreeDrafter(other, shape, tree.draft_temperature) for other in others)]
    )


def _find_judge(decode: DecodeConfig, drafter: PretrainedConfig) -> None:
    asked = StopConfig(kind="head", head=decode.tree.head)
    found = find_head(asked, str(decode.drafter), drafter, setting="tree.head")
    if found.head.config.state == "token":
        raise ConfigError(
            f"tree.head = {decode.tree.head!r} reads a token's own state, which is there only once "
            "the token has been fed; give a head trained with cache.state=drawn"
        )


def _open_judge(decode: DecodeConfig, pair: Pair) -> Judge | None:
    if decode.tree.head is None:
        return None
    assert pair.drafter_model is not None
    found = open_head(str(decode.drafter), decode.tree.head, pair.drafter_model)
    warn_of_other_sampling(found, decode.sampling)
    return slot_judge(found.head) if found.head.config.state == "slot" else drawn_judge(found.head)


def drawn_judge(head: AcceptanceHead) -> Judge:
    """Acceptance of candidates from the row they are in and their own probability in it."""

    def judge(hidden: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return head.acceptance(drawn_states(hidden, logits, tokens, rows))

    return judge


def slot_judge(head: AcceptanceHead) -> Judge:
    """Acceptance of whatever token a slot drafts."""

    def judge(hidden: Tensor, logits: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            return head.acceptance(hidden)[rows]

    return judge
