"""A method: drafter, stop policy, verifier, and how the target decodes."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from drafttrain.config.base import Config, split_at_commas
from drafttrain.config.kinds import copies_text
from drafttrain.config.stops import STOPS
from drafttrain.config.trees import TREES
from drafttrain.config.verifiers import RULES

StopName = Literal[*STOPS]
VerifierName = Literal["auto", *RULES]
TreeName = Literal[*TREES]


class SamplingConfig(Config):
    """How the target decodes. Temperature 0 is greedy decoding."""

    temperature: NonNegativeFloat = 0.0
    """0: greedy decoding; above: sampling. Logits are divided by it before sampling."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    max_new_tokens: PositiveInt = 128
    """Most tokens to generate for an input."""
    seed: int = 0
    """Seed of every random choice."""


class StopConfig(Config):
    """When a round of drafting ends."""

    kind: StopName = "fixed"
    """What ends a round. fixed: always k tokens. head: a trained acceptance head predicts that a
    draft token was probably rejected (SpecDec++). entropy: after a row of high entropy.
    confidence: after a token of low probability (as Transformers does); greedy decoding only.
    cumulative: once the draft tokens together are improbable. gain: after a level that adds little
    to the expected acceptance of an opt-tree, the default there. None changes the output."""
    k: PositiveInt = 10
    """Tokens drafted in a round, where that is fixed; levels of a tree."""
    max_draft: PositiveInt = 20
    """Most tokens (levels of a tree) drafted in a round by the other kinds. Default: policy.json's
    for a head; where one pass drafts a block, the slots that the drafter was trained with."""
    head: str | None = None
    """head: folder of the acceptance head. Default: the one beside the drafter, if there is one."""
    h: float | None = Field(default=None, gt=0.0, lt=1.0)
    """head: stop when a rejection is likelier than this. Default: policy.json's, else 0.7."""
    entropy: PositiveFloat = 2.0
    """entropy: stop after a row of more than so many nats."""
    confidence: float = Field(default=0.4, gt=0.0, lt=1.0)
    """confidence: stop after a token of less than this probability."""
    cumulative: float = Field(default=0.3, gt=0.0, lt=1.0)
    """cumulative: stop once the product of the rows' largest probabilities is less than this."""
    delta: float = Field(default=0.2, ge=0.0, lt=1.0)
    """gain: stop after a level that adds no more expected accepted tokens than this. Useful values
    lie between t_draft / t_target and 1; 0 goes on to max_draft levels."""


class VerifierConfig(Config):
    """How drafted tokens are accepted."""

    kind: VerifierName = "auto"
    """Rule of acceptance; only spec-verification changes the output. auto: greedy match at
    temperature 0, above it the rejection rule for drafts: rejection for chains, recursive for rsd-c
    and rsd-s, k-seq for paths (multi-round with several drafters), target-walk for other trees; all
    are lossless. So are block, for chains, and traversal, for drawn trees, which accept a little
    more: they judge whole prefixes, a later token may make up for an earlier one.
    spec-verification is lossy: it accepts tokens among the target's top beta within tau."""
    beta: PositiveInt = 3
    """Spec-Verification: the token must be among the target's top beta."""
    tau: NonNegativeFloat = 1.0
    """Spec-Verification: largest log-probability gap to the target's first choice (nats)."""


class TreeConfig(Config):
    """The shape of draft trees. stop.k is the number of levels."""

    kind: TreeName = "none"
    """Which tree the tokens of a round make. none: chains. paths: independent paths (SpecTr,
    SpecInfer). rsd-c, rsd-s: without replacement, by branching factors or stochastic beam search
    (RSD). opt-tree: the tree that expects the most accepted tokens (OPT-Tree). binary, eagle: fixed
    trees. sequoia: the best fixed tree for measured acceptance by rank. At temperature 0 use
    opt-tree or a fixed tree: drawn trees are chains there, unless draft_temperature is set."""
    width: PositiveInt = 3
    """paths: how many. rsd-s: sequences a level."""
    branching: tuple[PositiveInt, ...] = Field(default=(2, 2, 2), min_length=1)
    """rsd-c: siblings below every node of each level."""
    nodes: PositiveInt = 25
    """opt-tree, binary, sequoia: tokens of the tree (eagle has 25)."""
    by_rank: tuple[float, ...] | None = Field(default=None, min_length=1)
    """sequoia: how often the target's token is the drafter's first, second, ... choice. Default:
    measured by `drafttrain eval` on rank_data."""
    drafters: tuple[str, ...] = ()
    """paths: more drafters, each with `width` paths beside those of the first (SpecInfer)."""
    head: str | None = None
    """opt-tree: folder of an acceptance head that scores nodes."""
    draft_temperature: tuple[PositiveFloat, ...] | None = Field(default=None, min_length=1)
    """Temperature of the drafter's rows that tokens are drawn from, or an opt-tree is
    scored by; for that also one of each level, the last one's of all below it: 0.1,0.9. Default:
    the target's; for an opt-tree where the target is greedy those that training
    fitted to a Spec-Drafter's slots, and 0.5 where it fitted none."""

    _split = field_validator("draft_temperature", mode="before")(split_at_commas)


class CascadeConfig(Config):
    """Smaller drafters behind the drafter (CS Drafting). Each is smaller than the one before it; a
    language model's drafts are made by reviewing what those behind it say."""

    drafters: tuple[str, ...] = Field(min_length=1)
    """Folders or Hub names, from the largest down, as a rule to `max-gram`."""
    increments: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    """Tokens that each drafter adds to a round / in reviews, as 5,3,0/4,10/10; `drafttrain
    tune` finds them. This is the matrix K, a row for each depth of reviews: `drafter` adds
    5 tokens to a round and the second 3; in the first one's reviews the second adds 4 and the third
    10; and so on. Default: 5 a model; from max-gram 10 in reviews, none in a round."""
    leniency: float = Field(default=1.0, ge=1.0)
    """How lenient reviews inside are, from 1 on. They accept up to l times more than their own
    distribution would; against max-gram, and where the target reviews, l is 1 always. The output
    stays the target's own."""

    _split = field_validator("drafters", mode="before")(split_at_commas)

    @field_validator("increments", mode="before")
    @classmethod
    def _split_increments(cls, value: object) -> object:
        if isinstance(value, int):
            return [[value]]
        if not isinstance(value, str):
            return value
        return [row.split(",") for row in value.split("/")]

    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """K, the default where none is given."""
        if self.increments is not None:
            return self.increments
        levels, copies = 1 + len(self.drafters), copies_text(self.drafters[-1])
        rows = [[5] * (levels - depth) for depth in range(levels)]
        for row in rows if copies else ():
            row[-1] = 10
        if copies:
            rows[0][-1] = 0
        return tuple(map(tuple, rows))


class DecodeConfig(Config):
    """A method: a drafter, a stop policy and a verifier."""

    drafter: str | None = None
    """Folder or Hub name of the drafter; none: plain decoding; max-gram: copying from the text
    itself. max-gram copies what followed the longest earlier occurrence of the text's end (CS
    Drafting) and needs no training."""
    bigrams: str | None = None
    """max-gram: table of likeliest successors, for where nothing occurred before; made by
    `drafttrain bigrams`."""
    cascade: CascadeConfig | None = None
    """More drafters, which speed up the drafter's own drafting. A round drafts as many tokens as
    the first row of increments adds up to."""
    tree: TreeConfig = TreeConfig()
    """What the drafter's drafts look like: chains, or trees."""
    sampling: SamplingConfig = SamplingConfig()
    stop: StopConfig = StopConfig()
    verifier: VerifierConfig = VerifierConfig()
