"""Settings of the recipes that train language models to draft for decoder-only targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from drafttrain.config.base import Config, Precision
from drafttrain.config.recipes import DistillingRecipe, Part


class CausalDrafterShape(Config):
    """The shape of a drafter that drafts token by token for a decoder-only target."""

    layers: PositiveInt = 2
    """Layers, where it starts from the target's."""
    k: PositiveInt = 5
    """Draft tokens of a round, in validation and in an export's settings."""
    output_tokens: PositiveInt | None = None
    """Tokens that it can draft: the ends of outputs, then the most frequent of the distilled
    outputs. The output projection is most of a shallow drafter's cost; outputs stay exact. An
    export gives the other tokens rows that never win. Default: all."""
    prompt: Literal["own", "target"] = "own"
    """Which model reads prompts. own: the drafter. target: the drafter's cache starts with the
    target's keys and values of the prompt, so prompts cost nothing; other programs cannot do this.
    """
    embeddings: Literal["own", "target"] = "own"
    """Whose embeddings and output projection it has. target: shared and frozen, its folder holds
    none; `drafttrain export` writes whole folders for other programs."""


class CausalStart(Config):
    """What a causal drafter starts from: layers of its target, another model, or random weights."""

    layers: Literal["first", "last", "even"] | tuple[NonNegativeInt, ...] = "even"
    """Which of the target's layers it copies: first, last or evenly spaced ones (with the first and
    the last), or a list, counted from 0. Embeddings, final norm and output projection are copied
    too."""
    path: str | None = None
    """A language model with the target's tokens to start from, instead of the target's layers."""
    model: dict[str, Any] | None = None
    """Random weights instead: fields of the Transformers configuration; model_type names the
    family. Vocabulary and special tokens are the target's."""


class FollowTargetConfig(Config):
    """The objective of a causal drafter: divergences from the target's rows, each with a weight.

    p is the target's row and q the drafter's, both unwarped, at every token of the target's output.
    """

    cross_entropy: NonNegativeFloat = 0.0
    """Weight of -log q of the output's own token. Alone it trains without a call of the target."""
    forward_kl: NonNegativeFloat = 1.0
    """Weight of KL(p || q) (DistillSpec, Zhou et al. 2024)."""
    total_variation: NonNegativeFloat = 0.0
    """Weight of 1 - sum min(p, q): how often rejection sampling rejects a draft token."""
    lk_adaptive: NonNegativeFloat = 0.0
    """Weight of a KL(p || q) + (1 - a) (1 - sum min(p, q)) with a = exp(-3 sum min(p, q)):
    the KL divergence where p and q hardly overlap, total variation where they do (LK losses)."""
    frozen: tuple[Literal["embeddings", "output"], ...] = ("embeddings", "output")
    """Parts that stay as they start; where the two are tied, either name holds both. Random weights
    cannot stay: give frozen=[] for them."""
    packed_tokens: PositiveInt | None = None
    """Tokens of a sequence that several rows share; each sees itself alone, and the loss is the
    same. Default: a sequence a row, padded."""


class TeacherConfig(Config):
    """Where the target's rows come from that a drafter learns from."""

    kind: Literal["online", "cached"] = "online"
    """online: the target reads every batch. cached: it reads each distilled answer once; its
    likeliest tokens and their probabilities are kept on disk."""
    top_k: PositiveInt = 48
    """Tokens kept at each position; all others count as one token. All: the same as online."""
    folder: Path | None = None
    """Folder of what is kept, which several runs may share. Default: DISTILLED-teacher, beside the
    distilled rows."""
    dtype: Precision | None = None
    """Weights and activations of the target meanwhile; bfloat16 is faster on processors that
    support it. Default: the target's."""


class CausalDrafterRecipe(DistillingRecipe):
    """`recipes/train_causal_drafter.py`: distil the target if need be, then train a language model
    that drafts for it token by token."""

    drafter: CausalDrafterShape = CausalDrafterShape()
    initialise: CausalStart = CausalStart()
    objective: FollowTargetConfig = FollowTargetConfig()
    teacher: TeacherConfig = TeacherConfig()
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""


class ParallelDrafterShape(CausalDrafterShape):
    """The shape of a language model that drafts a block in one call (PARD)."""

    k: int = Field(default=8, ge=2)
    """Draft tokens of a call: the last committed token predicts the first, each of k - 1 masks
    another one."""
    mask_token: NonNegativeInt | None = None
    """Token that stands for a mask (`pard_token` in config.json): one that texts do not hold,
    neither the end nor the padding. Default: the tokenizer's mask, else an unused id, else a
    special token, else the last token that no distilled row holds."""


class FollowInBlocksConfig(FollowTargetConfig):
    """The objective of a parallel drafter: that of a causal one, at every token of every block.

    A block begins after each token of the output; its first token is learned everywhere, later ones
    in fewer blocks. Masks count towards the tokens of batches and of packed sequences.
    """

    kept: float = Field(default=0.7, gt=0.0, le=1.0)
    """Share of the blocks that have a k-th token: kept^(k - 1) (PARD's conditional drop). 1: all.
    """
    kept_floor: Part = 0.2
    """The least that this share falls to."""


class ParallelDrafterRecipe(CausalDrafterRecipe):
    """`recipes/train_parallel_drafter.py`: distil the target if need be, then train a language
    model that drafts several tokens in one call."""

    drafter: ParallelDrafterShape = ParallelDrafterShape()
    objective: FollowInBlocksConfig = FollowInBlocksConfig()


class StateDrafterShape(Config):
    """The shape of a drafter that reads its target's keys, values and hidden states."""

    k: PositiveInt = 4
    """Draft tokens of a round."""
    drafts: Literal["blocks", "tokens"] = "blocks"
    """blocks: all of them in one call. tokens: one a call, which knows the one before it."""
    previous_token_rank: NonNegativeInt = 256
    """Rank of the previous-token features of a block's slots; 0: none. Drafts of tokens need none.
    """
    layers: tuple[NonNegativeInt, ...] | None = None
    """The target's layers that it copies, counted from 0; in their places it reads the target's
    keys and values. Default: the last two."""
    states: tuple[int, ...] | None = None
    """Layers of the target whose outputs it is fed, counted from 0; -1: the last hidden state.
    Default: one at a quarter, one at two thirds of the depth, the one before `layers`, and -1."""
    output_tokens: PositiveInt | None = None
    """Tokens that it can draft: the ends of outputs, then the most frequent of the distilled
    outputs. Default: all."""


class StateStart(Config):
    """What a state drafter starts from, beside the target's layers."""

    tokens: PositiveInt = 60_000
    """Most tokens of the distilled outputs on which the linear map of states and token to the
    input of the layers is fitted by least squares."""


class StateDrafterRecipe(DistillingRecipe):
    """`recipes/train_state_drafter.py`: distil the target if need be, then train a drafter on
    the target's own states."""

    drafter: StateDrafterShape = StateDrafterShape()
    initialise: StateStart = StateStart()
    objective: FollowInBlocksConfig = FollowInBlocksConfig()
    reads_in: Precision | None = None
    """Type of the target's weights and activations while it teaches; bfloat16 is faster on
    processors that support it. Default: the target's."""
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""
