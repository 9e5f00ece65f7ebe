"""Trees grown from tables of logits, and their paths."""

from __future__ import annotations

import torch

from drafttrain.decoding.trees.shapes import Tree
from drafttrain.decoding.types import Proposal
from tests.decoding.paths import Path
from tests.decoding.toys import LogitsTable

START = (0,)


def grow(tree: Tree, table: LogitsTable, levels: int) -> Proposal:
    """Grows a tree from the rows of a table, as a session does."""
    fed = [-1]
    for _ in range(levels):
        paths = [(*START, *path_of(tree, node)) for node in fed]
        rows = torch.stack([table[path] for path in paths])
        fed = tree.grow(rows)
        if not fed:
            break
    return tree.proposal(levels)


def path_of(tree: Tree, node: int) -> Path:
    if node < 0:
        return ()
    return (*path_of(tree, tree.parents[node]), tree.tokens[node])
