"""Trees grown from tables of logits, and their paths."""

from collections.abc import Collection, Sequence
from functools import cache

import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.trees.shapes import Shape, Tree
from drafttrain.decoding.types import Proposal, Sampling
from tests.decoding.decoded import drawn
from tests.decoding.expected import expected_probs
from tests.decoding.paths import Path, paths_of
from tests.decoding.toys import LogitsTable

START = (0,)


@cache
def probs_after(table: LogitsTable, path: Path, sampling: Sampling) -> Tensor:
    """Returns the distribution [V] after a path."""
    return expected_probs(table[(*START, *path)], sampling)


def rows_along(target: LogitsTable, proposal: Proposal) -> Tensor:
    """Returns the target's logits for a draft: after the root and after each node."""
    return torch.stack([target[(*START, *path)] for path in [(), *paths_of(proposal)]])


def grown(
    shape: Shape,
    table: LogitsTable,
    sampling: Sampling,
    levels: int = 3,
    randomness: Randomness | None = None,
    ends: Collection[int | None] = (),
) -> Proposal:
    """Returns a draft tree that has grown from the rows of a table."""
    return grow(Tree(shape, sampling, randomness or drawn(), ends), table, levels)


def grow(tree: Tree, table: LogitsTable, levels: int) -> Proposal:
    """Grows a tree from the rows of a table, as a session does."""
    nodes = [-1]
    for _ in range(levels):
        paths = [(*START, *path_of(tree, node)) for node in nodes]
        rows = torch.stack([table[path] for path in paths])
        nodes = tree.grow(rows)
        if not nodes:
            break
    return tree.proposal(levels)


def proposal_of(
    paths: Sequence[Path], table: LogitsTable, sampling: Sampling, draw_kind: DrawKind
) -> Proposal:
    """Returns the draft tree with a node for each path and the rows that its nodes are drawn from.

    paths: each after its parent's.
    """
    parents = list(dict.fromkeys(path[:-1] for path in paths))
    return Proposal(
        tokens=torch.tensor([path[-1] for path in paths]),
        parents=torch.tensor([paths.index(path[:-1]) if len(path) > 1 else -1 for path in paths]),
        draw_kind=draw_kind,
        draft_probs=torch.stack([probs_after(table, path, sampling) for path in parents]),
        rows=torch.tensor([parents.index(path[:-1]) for path in paths]),
    )


def path_of(tree: Tree, node: int) -> Path:
    if node < 0:
        return ()
    return (*path_of(tree, tree.parents[node]), tree.tokens[node])
