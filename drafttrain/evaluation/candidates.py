"""The candidates of `drafttrain tune`: settings of decoding that a user could give to `eval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import DecodeConfig, StopConfig, TreeConfig, VerifierConfig
from drafttrain.config.kinds import DrafterKind, kind_of, named_kind
from drafttrain.config.stops import STOPS
from drafttrain.config.trees import TREES
from drafttrain.models.draft_states import drafts_tokens
from drafttrain.models.drafters import read_drafter_settings

MOST = 40
"""Candidates in all, plain decoding included."""
LENGTHS = {"tokens": (1, 2, 3, 4, 6, 8), "blocks": (2, 3, 4, 6, 8, 12), "copies": (2, 4, 8, 16)}
"""Fixed draft lengths by `DrafterKind.drafts`; of blocks also the length trained for."""
BY_ROWS = ("entropy", "confidence", "cumulative")
"""Stops that go by the drafter's distributions, each with its thresholds in a setting of its name.
"""
LEVELS = 4
"""Levels of trees that have a fixed number of them."""
GAIN = 0.2
"""Least gain of expected acceptance for which an opt-tree grows another level."""


@dataclass(frozen=True)
class Candidate:
    """A way to decode, under the name that the report gives it."""

    name: str
    decode: DecodeConfig
    head: str | None = None
    """Name of the acceptance head that it stops by."""

    @property
    def is_chain(self) -> bool:
        return self.decode.cascade is None and TREES[self.decode.tree.kind].shape is None

    @property
    def is_fixed(self) -> bool:
        """Whether it is a chain of fixed length."""
        return self.is_chain and self.decode.stop.kind == "fixed"


@dataclass(frozen=True)
class Drafting:
    """What the choice of candidates goes by."""

    kind: DrafterKind
    longest: int | None
    """Slots of a block drafter; None: any number of tokens."""
    grows_trees: bool

    @staticmethod
    def of(drafter: str) -> Drafting:
        """Of the drafter that settings name. Raises ConfigError as `read_drafter_settings`."""
        named = named_kind(drafter)
        if named is not None:
            return Drafting(named, None, grows_trees=False)
        settings = read_drafter_settings(drafter)
        kind = kind_of(settings)
        longest = settings.k if kind.drafts == "blocks" else None
        return Drafting(kind, longest, kind.tree_rows is not None and not drafts_tokens(settings))


def make_candidates(
    settings: TuneConfig, drafting: Drafting, heads: Mapping[str, Path], threshold: float | None
) -> list[Candidate]:
    """All candidates but plain decoding, which is always one too.

    heads: folders by name; threshold: h by Theorem 3.1, where it is known. Where tokens are
    sampled, fixed lengths are tried under rejection and block verification, other stops under block
    verification alone, which accepts at least as much for every draft (Sun et al. 2024).
    Raises ConfigError for more than MOST.
    """
    sampled = settings.sampling is not None and settings.sampling.temperature > 0
    found = [
        *_fixed(settings, drafting, sampled),
        *_stopped(settings, drafting, sampled),
        *_by_heads(settings, drafting, heads, threshold, sampled),
        *(_trees(settings, drafting, sampled) if drafting.grows_trees else ()),
        *_given(settings),
    ]
    names = [one.name for one in found]
    repeated = sorted({name for name in names if names.count(name) > 1} | ({"plain"} & {*names}))
    if repeated:
        raise ConfigError(
            f"candidates.{repeated[0]} has the name of another candidate; give it another one"
        )
    later = len(heads) if threshold is None and drafting.kind.drafts == "tokens" else 0
    count = 1 + len(found) + later
    if count > MOST:
        raise ConfigError(
            f"{count} candidates, plain decoding included, but at most {MOST} are "
            "decoded; give fewer values of k, h, entropy, confidence, cumulative or nodes, or "
            "trees=[]"
        )
    return found


def _fixed(settings: TuneConfig, drafting: Drafting, sampled: bool) -> Iterator[Candidate]:
    longest = drafting.longest
    lengths = settings.k or LENGTHS[drafting.kind.drafts]
    if settings.k is None and longest is not None:
        lengths = sorted({*(k for k in lengths if k <= longest), longest})
    for block in (False, True) if sampled else (False,):
        for k in lengths:
            if k > 1 or not block:  # of one token both rules are the same
                yield _chain(settings, f"k={k}", StopConfig(k=k), block)


def _stopped(settings: TuneConfig, drafting: Drafting, sampled: bool) -> Iterator[Candidate]:
    for kind in BY_ROWS:
        stop = STOPS[kind]
        if not stop.requires <= drafting.kind.provides or (sampled and stop.greedy_only):
            continue
        for value in getattr(settings, kind):
            most = most_drafted(settings, drafting)
            config = StopConfig(kind=kind, max_draft=most, **{kind: value})
            yield _chain(settings, f"{kind}({value:g})", config, sampled)


def _by_heads(
    settings: TuneConfig,
    drafting: Drafting,
    heads: Mapping[str, Path],
    threshold: float | None,
    sampled: bool,
) -> Iterator[Candidate]:
    values = {*settings.h, *(() if threshold is None else (round(threshold, 3),))}
    for head, folder in heads.items():
        for h in sorted(values):
            most = most_drafted(settings, drafting)
            config = StopConfig(kind="head", head=str(folder), h=h, max_draft=most)
            yield _chain(settings, f"{head} h={h:g}", config, sampled, head)


def _chain(
    settings: TuneConfig, name: str, stop: StopConfig, block: bool, head: str | None = None
) -> Candidate:
    rule = {"verifier": VerifierConfig(kind="block")} if block else {}
    name = f"{name} block" if block else name
    return Candidate(name, _decode(settings, stop=stop, **rule), head)


def _trees(settings: TuneConfig, drafting: Drafting, sampled: bool) -> Iterator[Candidate]:
    """Trees by their number of draft tokens, or one of a kind whose size is its own."""
    for kind in map(TREES.__getitem__, settings.trees):
        if kind.drawn and not sampled:
            continue
        levels = min(LEVELS, drafting.longest or LEVELS)
        stop = StopConfig(k=levels)
        if "expected" in kind.provides:
            stop = StopConfig(kind="gain", delta=GAIN, max_draft=most_drafted(settings, drafting))
        if not {"nodes", "width"} & kind.settings:
            yield Candidate(kind.name, _decode(settings, tree=TreeConfig(kind=kind.name)))
        elif "nodes" in kind.settings:
            for nodes in settings.nodes:
                tree = TreeConfig(kind=kind.name, nodes=nodes)
                yield Candidate(f"{kind.name}({nodes})", _decode(settings, tree=tree, stop=stop))
        else:
            for width in dict.fromkeys(max(2, nodes // levels) for nodes in settings.nodes):
                tree = TreeConfig(kind=kind.name, width=width)
                name = f"{kind.name}({width}x{levels})"
                yield Candidate(name, _decode(settings, tree=tree, stop=stop))


def _given(settings: TuneConfig) -> Iterator[Candidate]:
    for name, one in settings.candidates.items():
        for field in ("drafter", "sampling"):
            if field in one.model_fields_set:
                raise ConfigError(
                    f"candidates.{name}.{field} is given, but all candidates have the {field} of "
                    "the tuning; leave it out"
                )
        yield Candidate(name, _decode(settings, **dict(_set_fields(one))))


def _set_fields(one: DecodeConfig) -> Iterator[tuple[str, object]]:
    return ((name, getattr(one, name)) for name in one.model_fields_set)


def _decode(settings: TuneConfig, **parts: object) -> DecodeConfig:
    common = {"drafter": settings.drafter, "sampling": settings.sampling}
    if settings.bigrams is not None:
        common["bigrams"] = settings.bigrams
    return DecodeConfig(**common | parts)


def most_drafted(settings: TuneConfig, drafting: Drafting) -> int:
    """Most draft tokens of a round, where a stop ends it."""
    if "max_draft" in settings.model_fields_set or drafting.longest is None:
        return settings.max_draft
    return min(settings.max_draft, drafting.longest)


def check_trees(kinds: Sequence[str]) -> None:
    """Refuse kinds of trees that cannot be made from a number of tokens. Raises ConfigError."""
    for name in kinds:
        if name == "none":
            raise ConfigError("trees = 'none' is no tree; give [] for none")
        if "by_rank" in TREES[name].settings:
            raise ConfigError(
                f"trees = {name!r} needs acceptance by rank, which `drafttrain eval` measures "
                "(rank_data); give it in candidates with tree.by_rank, or give opt-tree"
            )
