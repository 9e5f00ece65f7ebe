"""Draft trees from settings: shapes, and the drafters that grow them."""

from __future__ import annotations

from pkgutil import resolve_name

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafttrain.build.heads import find_head, open_head, warn_of_other_sampling
from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import DecodeConfig, StopConfig, TreeConfig
from drafttrain.config.kinds import KINDS, in_words, kind_of, named_kind
from drafttrain.config.stops import STOPS
from drafttrain.config.trees import TREES
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter, check_width
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.trees.shapes import Judge, Shape
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import drafts_tokens, drawn_states
from drafttrain.models.drafters import read_drafter_settings, read_kind


def check_tree(decode: DecodeConfig) -> None:
    """Refuse a tree that cannot be right, before any large model is loaded.

    Raises ConfigError for settings that another kind of tree goes by, for a tree without a drafter
    that grows it, for drawn trees at temperature 0, for more siblings than there are tokens, for a
    sequoia tree without acceptance by rank, and for a head that cannot score nodes.
    """
    tree, kind = decode.tree, TREES[decode.tree.kind]
    for name in sorted(tree.model_fields_set - kind.settings - {"kind"}):
        kinds = [one.name for one in TREES.values() if name in one.settings]
        value = getattr(tree, name)
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(
            f"tree.{name} = {shown} counts for {' or '.join(kinds)} only, but the "
            f"tree is {tree.kind!r}; leave it out, or set tree.kind={kinds[0]}"
        )
    if kind.shape is None:
        return
    if named_kind(decode.drafter) is not None:
        raise ConfigError(
            f"tree.kind = {tree.kind!r}, but drafter {decode.drafter!r} has no rows to grow a tree "
            "from; give a trained drafter"
        )
    if kind.drawn and decode.sampling.temperature == 0 and tree.draft_temperature is None:
        raise ConfigError(
            f"tree.kind = {tree.kind!r} draws its tokens, but at temperature 0 all draws are the "
            "same; set tree.draft_temperature=1, or use opt-tree or a fixed tree"
        )
    if kind.drawn and len(tree.draft_temperature or ()) > 1:
        raise ConfigError(
            f"tree.draft_temperature = {list(tree.draft_temperature)} has one for each level, but "
            f"the tokens of a {tree.kind!r} tree are all drawn at one; give one number"
        )
    shape = build_shape(tree, decode.stop.k)
    settings = read_drafter_settings(str(decode.drafter))
    drafter = kind_of(settings)
    if drafter.tree_rows is None or drafts_tokens(settings):
        growing = in_words([one for one in KINDS.values() if one.tree_rows is not None])
        raise ConfigError(
            f"tree.kind = {tree.kind!r}, but drafter {decode.drafter!r} ({drafter.words}) can only "
            f"draft chains; leave the tree out, or give {growing}"
        )
    check_width(shape, settings.get_text_config(decoder=True).vocab_size)
    if tree.head is not None:
        _find_judge(decode, settings)


def check_companions(tree: TreeConfig) -> None:
    """Raise ConfigError for drafters side by side that are no language models."""
    for name in tree.drafters:
        kind = read_kind(name)
        if not kind.is_language_model:
            words = f"of kind {kind.name}" if kind.is_model else kind.words
            raise ConfigError(
                f"tree.drafters = {name!r} is {words}; paths of several drafters are drawn by "
                "language models; give one, or use it alone"
            )


def tree_stop(decode: DecodeConfig) -> StopConfig:
    """The stop policy asked for; a tree that estimates its acceptance stops by the gain of it."""
    given = decode.stop.model_fields_set
    if not TREES[decode.tree.kind].provides or given & {"kind", "k"}:
        return decode.stop
    own = next(stop for stop in STOPS.values() if "expected" in stop.requires)
    return StopConfig(kind=own.name, **decode.stop.model_dump(exclude_unset=True))


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


def _find_judge(decode: DecodeConfig, drafter: PretrainedConfig) -> None:
    found = find_head(decode.tree.head, str(decode.drafter), drafter, setting="tree.head")
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
