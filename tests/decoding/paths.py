"""Paths of a draft tree from a root to a node, as nodes and as tokens."""

from torch import Tensor

from drafttrain.decoding.types import Proposal

Path = tuple[int, ...]


def nodes_to(parents: Tensor, node: int) -> list[int]:
    """Returns the nodes of the path that ends at this node; none for node -1."""
    nodes: list[int] = []
    while node >= 0:
        nodes, node = [node, *nodes], int(parents[node])
    return nodes


def tokens_to(draft: Proposal, node: int) -> Path:
    """Returns the tokens of the path that ends at this node; none for node -1."""
    return tuple(draft.tokens[nodes_to(draft.parents, node)].tolist())


def paths_of(draft: Proposal) -> list[Path]:
    """Returns the tokens of the path to each node."""
    paths: list[Path] = []
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
