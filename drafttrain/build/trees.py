"""Draft trees from settings: shapes, and the drafters that grow them."""

from __future__ import annotations

from pkgutil import resolve_name

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.build.heads import open_head, warn_of_other_sampling
from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, TreeConfig
from drafttrain.config.trees import TREES
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.trees.shapes import Judge, Shape
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import drawn_states


def build_shape(tree: TreeConfig, depth: int, judge: Judge | None = None) -> Shape:
    """The shape of the trees. Raises ConfigError where acceptance by rank is missing."""
    kind = TREES[tree.kind]
    assert kind.shape is not None
    if "by_rank" in kind.arguments and tree.by_rank is None:
        raise ConfigError(
            f"tree.by_rank is missing for a {kind.name} tree; give the shares, or let `drafttrain "
            "eval` measure them: rank_data.path=PROMPTS (not those reported on)"
        )
    values = {**dict(tree), "depth": depth, "judge": judge}
    return resolve_name(kind.shape)(*(values[name] for name in kind.arguments))


def tree_settings(tree: TreeConfig, depth: int) -> dict[str, float]:
    """Most levels and tokens of the trees, by which methods are compared."""
    kind = TREES[tree.kind]
    levels = depth
    if kind.shape is not None:
        levels = min(depth, build_shape(tree, depth).deepest or depth)
    return {"depth": float(levels), "nodes": float(kind.nodes(tree, depth))}


def build_drafter(decode: DecodeConfig, pair: Pair) -> Drafter:
    """The pair's drafter, growing the trees asked for.

    Raises ValueError where the drafter cannot be given branches, or for a tree wider than its
    vocabulary.
    """
    tree, drafter = decode.tree, pair.drafter
    if TREES[tree.kind].shape is None:
        return drafter
    if decode.sampling.temperature == 0 and pair.drafter_model is not None:
        tree = _scored_as_fitted(tree, pair.drafter_model.config)
    shape = build_shape(tree, decode.stop.k, _open_judge(decode, pair))
    drawn_at = None
    if TREES[tree.kind].drawn and tree.draft_temperature is not None:
        [drawn_at] = tree.draft_temperature
    first = TreeDrafter(drafter, shape, drawn_at)
    if not tree.drafters:
        return first
    others = [pair.companions[name] for name in tree.drafters]
    return SeveralDrafters([first, *(TreeDrafter(other, shape, drawn_at) for other in others)])


def _scored_as_fitted(tree: TreeConfig, drafter: PretrainedConfig) -> TreeConfig:
    """The same, scored at the temperatures that were fitted to the drafter's slots, if any, unless
    others are asked for."""
    kind, fitted = TREES[tree.kind], getattr(drafter, "slot_temperatures", None)
    if not fitted or tree.draft_temperature is not None:
        return tree
    if kind.drawn or "draft_temperature" not in kind.settings:
        return tree
    return tree.model_copy(update={"draft_temperature": tuple(fitted)})


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
