"""Builds a drafter of chains or trees, or a cascade, from settings."""

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name

from drafttrain.build.pairs import Pair
from drafttrain.config.base import ConfigError
from drafttrain.config.decode import CascadeConfig, DecodeConfig, TreeConfig
from drafttrain.config.methods import TREES
from drafttrain.decoding.drafters.cascade import Level, cascade, show_increments
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.trees.shapes import Shape


def build_drafter(decode: DecodeConfig, pair: Pair) -> Drafter:
    """Returns the pair's drafter, or a tree drafter or cascade that is built from it."""
    if decode.cascade is not None:
        return _build_cascade(decode.drafters, decode.cascade, pair)
    kind, tree, name = TREES[decode.tree.kind], decode.tree, str(decode.drafter)
    if kind.shape is None:
        return pair.drafters[name]
    drawn_at = tree.draft_temperature if kind.drawn else None
    shape = build_shape(tree, decode.stop.k)
    drafters = [pair.drafters[path] for path in decode.drafters]
    trees = [TreeDrafter(drafter, shape, drawn_at) for drafter in drafters]
    return trees[0] if len(trees) == 1 else SeveralDrafters(trees)


def build_shape(tree: TreeConfig, depth: int) -> Shape:
    """Returns the tree shape. Raises ConfigError if acceptance by rank is needed but missing."""
    kind = TREES[tree.kind]
    assert kind.shape is not None
    if "by_rank" in kind.arguments and tree.by_rank is None:
        raise ConfigError(
            f"tree.by_rank is missing for a {kind.name} tree; give it, or let `drafttrain eval` "
            "measure it with rank_data.path=PROMPTS (not the test prompts)"
        )
    values = {**dict(tree), "depth": depth}
    return resolve_name(kind.shape)(*(values[name] for name in kind.arguments))


def tree_settings(tree: TreeConfig, depth: int) -> dict[str, int]:
    """Returns the maximal depth and number of draft tokens (nodes), for comparing methods."""
    kind = TREES[tree.kind]
    deepest = None if kind.shape is None else build_shape(tree, depth).deepest
    return {"depth": min(depth, deepest or depth), "nodes": kind.nodes(tree, depth)}


def _build_cascade(paths: Sequence[str], settings: CascadeConfig, pair: Pair) -> Drafter:
    """Builds a cascade with levels in the order of the settings, named after their folders."""
    names, matrix = level_names(paths), settings.matrix()
    levels = [Level(name, pair.drafters[path]) for name, path in zip(names, paths, strict=True)]
    lenient = f" l={settings.leniency:g}" if settings.leniency > 1 else ""
    name = f"cascade {'>'.join(names)} {show_increments(matrix)}{lenient}"
    return cascade(levels, matrix, settings.leniency, pair.model.eos_ids, name)


def level_names(drafters: Sequence[str]) -> list[str]:
    """Returns short distinct names of cascade levels: last parts of their paths without final/."""
    paths = map(Path, drafters)
    folders = [path.parent if path.name == "final" and path.parent.name else path for path in paths]
    for parts in range(1, max(len(path.parts) for path in folders) + 1):
        names = ["/".join(path.parts[-parts:]) for path in folders]
        if len(set(names)) == len(names):
            break
    return shortened(names)


def shortened(names: Sequence[str], most: int = 24) -> list[str]:
    """Returns the names, with the middle of long ones cut as far as they stay distinct."""
    for size in range(most, 1 + max(map(len, names), default=0)):
        half = size // 2
        cut = [n if len(n) <= size else f"{n[:half]}…{n[-half + 1 :]}" for n in names]
        if len(set(cut)) == len(set(names)):
            return cut
    return list(names)
