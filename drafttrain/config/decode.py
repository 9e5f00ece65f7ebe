"""Settings of a method (drafter, stop policy, verifier) and of sampling."""

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
from drafttrain.config.inputs import Location
from drafttrain.config.kinds import copies_text
from drafttrain.config.methods import RULES, STOPS, TREES, StopKind, TreeKind, VerifierRule

StopName = Literal[*STOPS]
VerifierName = Literal["auto", *RULES]
TreeName = Literal[*TREES]
_SAMPLED = CountsFor("temperature=...")


class SamplingConfig(Config):
    """How the target decodes. Temperature 0 is greedy decoding."""

    temperature: NonNegativeFloat = 0.0
    """0: greedy decoding. Above 0: sampling from logits divided by this value."""
    top_k: Annotated[CountOrZero, _SAMPLED] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), _SAMPLED] = 1.0
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), _SAMPLED] = 0.0
    """Keep tokens whose probability is at least this share of the largest one; 0 keeps all."""
    max_new_tokens: Count = 128
    """Largest number of tokens generated for an input."""
    seed: Seed = 0
    """Seed of every random choice."""


class StopConfig(Config):
    """When a round of drafting ends."""

    kind: StopName = "fixed"
    """Stop policy of a draft. fixed: after k tokens. head: when an acceptance head predicts a
    rejection (SpecDec++). entropy: at high entropy of the drafter's distribution. confidence: after
    a token of low probability (greedy decoding only). cumulative: when the product of probabilities
    is low. gain: when another level adds little to an opt-tree (its default)."""
    k: Few = 10
    """fixed: draft tokens per round; for trees, the number of levels."""
    max_draft: Few = 20
    """Other kinds: largest number of draft tokens per round (levels of a tree). Default: for a head
    that of policy.json, for block drafters the k of training."""
    head: Location | None = None
    """head: folder of the acceptance head. Default: the head in the drafter's folder, if any."""
    h: Fraction | None = None
    """head: stop when the predicted probability of a rejection exceeds this. Default: the value in
    policy.json, else 0.7."""
    entropy: PositiveFloat = 2.0
    """entropy: stop when the entropy of the drafter's distribution exceeds this, in nats."""
    confidence: Fraction = 0.4
    """confidence: stop after a draft token with a lower probability than this."""
    cumulative: Fraction = 0.3
    """cumulative: stop when the product of all rows' largest probabilities falls below this."""
    delta: float = Field(default=0.2, ge=0.0, lt=1.0)
    """gain: stop after a level that adds at most this many expected accepted tokens."""


class VerifierConfig(Config):
    """How drafted tokens are accepted."""

    kind: VerifierName = "auto"
    """Acceptance rule; only spec-verification changes the output. auto: greedy match at temperature
    0, above it rejection for chains, recursive for rsd-c and rsd-s, k-seq for paths (multi-round if
    of several drafters), else target-walk. block (for chains) accepts slightly more tokens."""
    beta: Count = 3
    """Spec-Verification: an accepted token is among the target's top beta tokens."""
    tau: NonNegativeFloat = 1.0
    """Spec-Verification: largest gap of log-probability to the target's first choice, in nats."""


class TreeConfig(Config):
    """The shape of draft trees. stop.k is the number of levels."""

    kind: TreeName = "none"
    """Shape of a draft. none: a chain. paths: independent paths (SpecTr, SpecInfer). rsd-c, rsd-s:
    tokens drawn without replacement, with constant branching factors or by stochastic beam search
    (RSD). opt-tree: the tree with the largest expected number of accepted tokens (OPT-Tree).
    binary, eagle: fixed trees. sequoia: the best fixed tree for the measured acceptance by rank.
    Drawn trees are chains at temperature 0, unless draft_temperature is set."""
    width: Few = 3
    """paths: number of paths. rsd-s: nodes per level."""
    branching: tuple[Few, ...] = Field(default=(2, 2, 2), min_length=1)
    """rsd-c: children of every node, for each level."""
    nodes: Few = 25
    """opt-tree, binary, sequoia: number of draft tokens (eagle has 25)."""
    by_rank: tuple[float, ...] | None = Field(default=None, min_length=1)
    """sequoia: share of positions where the target's token is the drafter's first, second, ...
    choice. Default: measured by `drafttrain eval` on rank_data."""
    drafters: tuple[Location, ...] = ()
    """paths: additional drafters, each of which adds `width` paths (SpecInfer)."""
    draft_temperature: PositiveFloat | None = None
    """Temperature of the distribution from which the drafter draws, or which scores an opt-tree.
    Default: the target's; for opt-trees in greedy decoding 0.5."""


def _split_rows(value: object) -> object:
    """Splits `5,3,0/4,10/10` into rows; a number is a matrix of one entry."""
    if isinstance(value, int):
        return [[value]]
    return [row.split(",") for row in value.split("/")] if isinstance(value, str) else value


class CascadeConfig(Config):
    """Smaller drafters that draft for the drafter (CS Drafting), the largest first; each language
    model reviews what the ones after it draft."""

    drafters: Annotated[tuple[Location, ...], Listed] = Field(min_length=1)
    """Folders or Hub names from the largest to the smallest; the last one is usually `max-gram`."""
    increments: Annotated[
        tuple[tuple[FewOrZero, ...], ...] | None, BeforeValidator(_split_rows)
    ] = None
    """Matrix K: tokens that each drafter adds to a round, then (after `/`) in the reviews at each
    depth, as 5,3,0/4,10/10. Default: 5 for models; for max-gram 10 in reviews, 0 in a round."""
    leniency: float = Field(default=1.0, ge=1.0)
    """Factor by which reviews inside the cascade accept more. The target's output is unchanged."""

    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """Returns the matrix K, or its default."""
        if self.increments is not None:
            return self.increments
        levels = 1 + len(self.drafters)
        rows = [[5] * (levels - depth) for depth in range(levels)]
        if copies_text(self.drafters[-1]):
            rows = [[*row[:-1], 10 if depth else 0] for depth, row in enumerate(rows)]
        return tuple(map(tuple, rows))


class DecodeConfig(Config):
    """A method: a drafter, a stop policy and a verifier."""

    drafter: Location | None = None
    """Folder or Hub name of the drafter. none: plain decoding. max-gram: copies the tokens that
    followed the longest earlier match of the text's end (CS Drafting)."""
    bigrams: Location | None = None
    """max-gram: table of the most frequent next token of each, written by `drafttrain bigrams`."""
    cascade: CascadeConfig | None = None
    """Smaller drafters that draft for the drafter."""
    tree: TreeConfig = TreeConfig()
    """Shape of the drafts: chains or trees."""
    sampling: SamplingConfig = SamplingConfig()
    stop: StopConfig = StopConfig()
    verifier: VerifierConfig = VerifierConfig()

    @property
    def drafters(self) -> tuple[str, ...]:
        """All drafters of the method, starting with `drafter`."""
        others = self.tree.drafters if self.cascade is None else self.cascade.drafters
        return (str(self.drafter), *others)


def check_given(
    group: str, given: Config, kinds: Mapping[str, StopKind | TreeKind | VerifierRule]
) -> None:
    """Raises ConfigError for a given setting of `stop`, `tree` or `verifier` of another kind."""
    used = kinds[given.kind].settings if given.kind in kinds else ()
    for name in sorted(given.model_fields_set - {"kind", *used}):
        users = [kind.name for kind in kinds.values() if name in kind.settings]
        raise ConfigError(
            f"{group}.{name} = {getattr(given, name)} is for {' or '.join(users)} only, but "
            f"{group}.kind is {given.kind!r}; leave it out, or add --{group} {users[0]}"
        )
