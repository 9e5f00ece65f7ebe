"""Trees and cascades to try, as settings of decoding: shapes, sizes and increments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from drafttrain.build.method import method_stop
from drafttrain.build.sizes import method_kind
from drafttrain.build.trees import build_shape, tree_settings
from drafttrain.build.verifiers import sampled_rule
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import CascadeConfig, DecodeConfig, StopConfig, TreeConfig
from drafttrain.config.stops import STOPS
from drafttrain.config.trees import TREES, TreeKind
from drafttrain.evaluation.played.increments import (
    Increments,
    LevelKind,
    kind_of,
    neighbours,
    propose,
)

CASCADE = "cascade"


@dataclass(frozen=True)
class Played:
    """A method whose rounds no trace of the output tells: what drafts, and how much."""

    decode: DecodeConfig

    @property
    def kind(self) -> Literal["tree", "cascade"]:
        return "tree" if self.decode.cascade is None else "cascade"

    @property
    def way(self) -> str:
        """What cost functions are of: methods of one way differ in size alone."""
        return method_kind(self.decode)

    @property
    def verifier(self) -> str:
        """The rule that judges its drafts, where tokens are sampled."""
        return sampled_rule(self.decode.tree)

    @property
    def head(self) -> None:
        """None: heads stop chains."""

    @property
    def nodes(self) -> int:
        """Most tokens of a draft."""
        stop = method_stop(self.decode)
        levels = getattr(stop, STOPS[stop.kind].settings[-1])
        return int(tree_settings(self.decode.tree, levels)["nodes"])

    @property
    def uses(self) -> frozenset[int]:
        """Levels of a cascade that draft something; they have costs of their own."""
        cascade = self.decode.cascade
        if cascade is None:
            return frozenset()
        rows = enumerate(cascade.matrix())
        return frozenset(
            depth + place for depth, row in rows for place, count in enumerate(row) if count
        )

    @property
    def increments(self) -> Increments | None:
        """A cascade's."""
        cascade = self.decode.cascade
        return None if cascade is None else Increments(cascade.matrix(), cascade.leniency)

    @property
    def value(self) -> float:
        """What it is sorted by in reports: its most tokens."""
        return float(self.nodes)

    @property
    def name(self) -> str:
        """The shape and what ends it: opt-tree(16) gain(0.2,20), rsd-s(4) k=2; a cascade's
        increments."""
        if self.increments is not None:
            return f"cascade {self.increments.name}"
        stop = self.decode.stop
        kind = STOPS[stop.kind]
        ends = kind.shown.format(getattr(stop, kind.varied), getattr(stop, kind.settings[-1]))
        return f"{build_shape(self.decode.tree, stop.k).name} {ends}"


def trees_of(settings: TuneConfig, deepest: int) -> list[Played]:
    """The trees that the settings ask for, each once; drawn ones only where tokens are sampled.

    deepest: most levels of those that stop by their gain.
    """
    found: dict[Played, None] = {}
    for name in settings.trees:
        kind = TREES[name]
        if kind.shape is None or (kind.drawn and settings.sampling.temperature == 0):
            continue
        for tree, stop in _sized(kind, settings, deepest):
            one = DecodeConfig(
                drafter=settings.drafter, tree=tree, stop=stop, sampling=settings.sampling
            )
            found.setdefault(Played(one))
    return list(found)


def _sized(
    kind: TreeKind, settings: TuneConfig, deepest: int
) -> Iterator[tuple[TreeConfig, StopConfig]]:
    """A kind of tree at every size, with what ends its growth."""
    for nodes in settings.nodes:
        if kind.provides:
            sized = {"nodes": nodes} if "nodes" in kind.settings else {}
            for delta in settings.delta:
                stop = StopConfig(kind="gain", delta=delta, max_draft=deepest)
                yield TreeConfig(kind=kind.name, **sized), stop
            continue
        for levels in settings.levels:
            tree = _shaped(kind, nodes, levels)
            if tree is not None:
                own = build_shape(tree, levels).deepest or levels
                yield tree, StopConfig(k=min(levels, own))


def _shaped(kind: TreeKind, nodes: int, levels: int) -> TreeConfig | None:
    """A tree of so many tokens and levels; None where that leaves one token a level. Of branching
    factors, all is in the first."""
    width = nodes // levels
    sizes = {"nodes": nodes, "width": width, "branching": (width, *[1] * (levels - 1))}
    if width < 2 and kind.settings & {"width", "branching"}:
        return None
    own = {name: size for name, size in sizes.items() if name in kind.settings}
    return TreeConfig(kind=kind.name, **own)


def cascades_of(settings: TuneConfig) -> list[Played]:
    """So many cascades of the drafters that the settings name; none where they name none.

    Raises ConfigError for a drafter that cannot be read.
    """
    if not settings.cascade:
        return []
    kinds = level_kinds(settings)
    default = CascadeConfig(drafters=settings.cascade).matrix()
    seed = settings.sampling.seed
    found = propose(kinds, default, settings.leniency, settings.cascades, seed)
    return [cascade_of(settings, one) for one in found]


def cascade_of(settings: TuneConfig, increments: Increments) -> Played:
    """A cascade of the drafters that the settings name."""
    lenient = {"leniency": increments.leniency} if increments.leniency > 1.0 else {}
    matrix = increments.increments
    cascade = CascadeConfig(drafters=settings.cascade, increments=matrix, **lenient)
    decode = DecodeConfig(
        drafter=settings.drafter,
        bigrams=settings.bigrams,
        cascade=cascade,
        sampling=settings.sampling,
    )
    return Played(decode)


def near(settings: TuneConfig, best: Played) -> list[Played]:
    """Candidates that differ a little from one: cascades in one increment; of trees, all sizes are
    tried anyway."""
    if best.increments is None:
        return []
    return [cascade_of(settings, one) for one in neighbours(best.increments, level_kinds(settings))]


def level_kinds(settings: TuneConfig) -> list[LevelKind]:
    """What each drafter of the cascade is, from the largest down."""
    return [kind_of(path) for path in (str(settings.drafter), *settings.cascade)]


def timed_of(candidates: Sequence[Played]) -> list[Played]:
    """Those of each way that costs are measured on: the first, the least, the middle one and the
    largest, and more until every level of a cascade is among them."""
    found: dict[Played, None] = {}
    for way in dict.fromkeys(one.way for one in candidates):
        own = [one for one in candidates if one.way == way]
        ordered = sorted(own, key=lambda one: one.nodes)
        some = dict.fromkeys([own[0], ordered[0], ordered[len(ordered) // 2], ordered[-1]])
        used = frozenset().union(*(one.uses for one in some))
        for one in own:
            if one.uses - used:
                some[one], used = None, used | one.uses
        found |= some
    return list(found)
