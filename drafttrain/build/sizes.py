"""What a method is called in reports, and how large its drafts are: facts, not display names."""

from __future__ import annotations

from collections.abc import Mapping

from drafttrain.build.trees import tree_settings
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.kinds import NONE, named_kind
from drafttrain.config.trees import TREES
from drafttrain.decoding.roles import StopPolicy

Size = int | list[int] | list[list[int]]
Sizes = Mapping[str, Size]
"""depth: most levels of a draft (a chain's tokens); nodes: its most draft tokens, which the target
scores at once. Beside them what the method itself goes by: k of a chain of fixed length, max_draft
where a policy may stop earlier; width, branching and drafters (several, side by side) of a tree;
increments of a cascade, a row for each depth of reviews; beams of beam search."""


def method_kind(config: DecodeConfig) -> str:
    """plain, chain, cascade, or the kind of tree; `opt-tree,head` where a head scores its nodes."""
    if named_kind(config.drafter) is NONE:
        return "plain"
    if config.cascade is not None:
        return "cascade"
    if TREES[config.tree.kind].shape is None:
        return "chain"
    return f"{config.tree.kind},head" if config.tree.head is not None else config.tree.kind


def draft_sizes(config: DecodeConfig, stop: StopPolicy) -> dict[str, Size]:
    """The sizes of a method's drafts, as `Sizes` says; none of plain decoding."""
    if named_kind(config.drafter) is NONE:
        return {}
    tree, kind = config.tree, TREES[config.tree.kind]
    sizes = tree_settings(tree, stop.longest)
    found: dict[str, Size] = {name: int(size) for name, size in sizes.items()}
    if "max_draft" in stop.rule.settings:
        found["max_draft"] = stop.longest
    elif kind.shape is None:
        found["k"] = stop.longest
    if "width" in kind.settings:
        found["width"] = tree.width
    if "branching" in kind.settings:
        found["branching"] = list(tree.branching)
    if tree.drafters:
        found["drafters"] = 1 + len(tree.drafters)
    if config.cascade is not None:
        found["increments"] = [list(row) for row in config.cascade.matrix()]
    return found
