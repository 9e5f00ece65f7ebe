"""A method: drafter, stop policy, verifier, and how the target decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat

from drafttrain.config.base import (
    Config,
    ConfigError,
    Count,
    CountOrZero,
    CountsFor,
    Few,
    FewOrZero,
    Fraction,
    Listed,
    Seed,
)
from drafttrain.config.kinds import copies_text
from drafttrain.config.methods import RULES, STOPS, TREES, StopKind, TreeKind, VerifierRule

StopName = Literal[*STOPS]
VerifierName = Literal["auto", *RULES]
TreeName = Literal[*TREES]


_SAMPLED = CountsFor("temperature=...")


class SamplingConfig(Config):
    """How the target decodes. Temperature 0 is greedy decoding."""

    temperature: NonNegativeFloat = 0.0
    """0: greedy decoding; above: sampling. Logits are divided by it before sampling."""
    top_k: Annotated[CountOrZero, _SAMPLED] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), _SAMPLED] = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), _SAMPLED] = 0.0
    """Keep tokens that are at least this times as likely as the likeliest; 0 keeps all."""
    max_new_tokens: Count = 128
    """Most tokens to generate for an input."""
    seed: Seed = 0
    """Seed of every random choice."""


class StopConfig(Config):
    """When a round of drafting ends."""

    kind: StopName = "fixed"
    """What ends a round. fixed: k tokens. head: an acceptance head (SpecDec++). entropy: a row of
    high entropy. confidence: an improbable token (greedy decoding only). cumulative: the draft
    tokens together are improbable. gain: a level adds little to an opt-tree, the default there."""
    k: Few = 10
    """Tokens drafted in a round, where that is fixed; levels of a tree."""
    max_draft: Few = 20
    """Most draft tokens (levels of a tree) of the other kinds. Default: policy.json's for a head;
    for blocks the slots of the training."""
    head: str | None = None
    """head: folder of the acceptance head. Default: the one beside the drafter, if there is one."""
    h: Fraction | None = None
    """head: stop when a rejection is likelier than this. Default: policy.json's, else 0.7."""
    entropy: PositiveFloat = 2.0
    """entropy: stop after a row of more nats than this."""
    confidence: Fraction = 0.4
    """confidence: stop after a token of less than this probability."""
    cumulative: Fraction = 0.3
    """cumulative: stop once the product of the rows' largest probabilities is less than this."""
    delta: float = Field(default=0.2, ge=0.0, lt=1.0)
    """gain: stop after a level that adds no more expected accepted tokens than this."""


class VerifierConfig(Config):
    """How drafted tokens are accepted."""

    kind: VerifierName = "auto"
    """Rule of acceptance; only spec-verification changes the output. auto: greedy match at
    temperature 0, above it rejection for chains, recursive for rsd-c and rsd-s, k-seq for paths
    (multi-round with several drafters), target-walk for other trees. block, for chains, and
    traversal, for drawn trees, accept a little more."""
    beta: Count = 3
    """Spec-Verification: the token must be among the target's top beta."""
    tau: NonNegativeFloat = 1.0
    """Spec-Verification: largest log-probability gap to the target's first choice (nats)."""


class TreeConfig(Config):
    """The shape of draft trees. stop.k is the number of levels."""

    kind: TreeName = "none"
    """Tree of a round's draft tokens. none: chains. paths: independent paths (SpecTr, SpecInfer).
    rsd-c, rsd-s: without replacement, by branching factors or stochastic beam search (RSD).
    opt-tree: the tree of the most expected accepted tokens (OPT-Tree). binary, eagle: fixed trees.
    sequoia: the best fixed tree for measured acceptance by rank. Drawn trees are chains at
    temperature 0, unless draft_temperature is set."""
    width: Few = 3
    """paths: how many. rsd-s: sequences a level."""
    branching: tuple[Few, ...] = Field(default=(2, 2, 2), min_length=1)
    """rsd-c: siblings below every node of each level."""
    nodes: Few = 25
    """opt-tree, binary, sequoia: tokens of the tree (eagle has 25)."""
    by_rank: tuple[float, ...] | None = Field(default=None, min_length=1)
    """sequoia: how often the target's token is the drafter's first, second, ... choice. Default:
    measured by `drafttrain eval` on rank_data."""
    drafters: tuple[str, ...] = ()
    """paths: more drafters, each with `width` paths beside those of the first (SpecInfer)."""
    draft_temperature: Annotated[tuple[PositiveFloat, ...] | None, Listed] = Field(
        default=None, min_length=1
    )
    """Temperature of the rows that tokens are drawn from, or an opt-tree is scored by (there also
    one a level: 0.1,0.9). Default: the target's; for an opt-tree in greedy decoding those fitted to
    a Spec-Drafter's slots, else 0.5."""


def _split_rows(value: object) -> object:
    """`5,3,0/4,10/10` as its rows."""
    if isinstance(value, int):
        return [[value]]
    return [row.split(",") for row in value.split("/")] if isinstance(value, str) else value


class CascadeConfig(Config):
    """Smaller drafters that draft for the drafter (CS Drafting), the largest first; each language
    model reviews what the ones after it draft."""

    drafters: Annotated[tuple[str, ...], Listed] = Field(min_length=1)
    """Folders or Hub names, from the largest down, as a rule to `max-gram`."""
    increments: Annotated[
        tuple[tuple[FewOrZero, ...], ...] | None, BeforeValidator(_split_rows)
    ] = None
    """Matrix K: tokens that each drafter adds to a round / in reviews of each depth, as
    5,3,0/4,10/10. Default: 5 a model; from max-gram 10 in reviews, none in a round."""
    leniency: float = Field(default=1.0, ge=1.0)
    """Reviews inside the cascade accept up to this many times more than their own distribution
    would. The output stays the target's own."""

    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """K, the default where none is given."""
        if self.increments is not None:
            return self.increments
        levels, copies = 1 + len(self.drafters), copies_text(self.drafters[-1])
        rows = [[5] * (levels - depth) for depth in range(levels)]
        if copies:
            rows[1:] = [[*row[:-1], 10] for row in rows[1:]]
            rows[0][-1] = 0
        return tuple(map(tuple, rows))


class DecodeConfig(Config):
    """A method: a drafter, a stop policy and a verifier."""

    drafter: str | None = None
    """Folder or Hub name of the drafter; none: plain decoding; max-gram: copies of what followed
    the longest earlier occurrence of the text's end (CS Drafting)."""
    bigrams: str | None = None
    """max-gram: table of likeliest successors, made by `drafttrain bigrams`."""
    cascade: CascadeConfig | None = None
    """More drafters, which speed up the drafter's own drafting."""
    tree: TreeConfig = TreeConfig()
    """What the drafter's drafts look like: chains, or trees."""
    sampling: SamplingConfig = SamplingConfig()
    stop: StopConfig = StopConfig()
    verifier: VerifierConfig = VerifierConfig()

    @property
    def drafters(self) -> tuple[str, ...]:
        """All drafters of the method, the first one first."""
        others = self.tree.drafters if self.cascade is None else self.cascade.drafters
        return (str(self.drafter), *others)


def check_given(
    group: str, given: Config, kinds: Mapping[str, StopKind | TreeKind | VerifierRule]
) -> None:
    """Refuse settings of `stop`, `tree` or `verifier` that only other kinds use.

    Raises ConfigError.
    """
    own = kinds[given.kind].settings if given.kind in kinds else ()
    for name in sorted(given.model_fields_set - {"kind", *own}):
        users = [one.name for one in kinds.values() if name in one.settings]
        raise ConfigError(
            f"{group}.{name} = {getattr(given, name)} counts for {' or '.join(users)} only, but "
            f"{group}.kind is {given.kind!r}; leave it out, or add --{group} {users[0]}"
        )
