"""Settings of the recipes that train language models to draft for decoder-only targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from drafttrain.config.base import Config, Precision
from drafttrain.config.recipes import DistillingRecipe, TrainConfig


class CausalDrafterShape(Config):
    """The shape of a drafter that drafts token by token for a decoder-only target."""

    layers: PositiveInt = 2
    """Layers, where it starts from the target's first, last or evenly spaced ones."""
    k: PositiveInt = 5
    """Tokens drafted in a round, in validation and in an export's settings."""
    output_tokens: PositiveInt | None = None
    """Tokens that it can draft here: the ends of outputs, then those that occur most often in the
    distilled outputs. The output projection is most of what a token of a shallow drafter costs;
    outputs stay exact. Other programs score all tokens; an export makes the rest never win there.
    Default: all."""
    prompt: Literal["own", "target"] = "own"
    """Who reads prompts. own: the drafter. target: the deep part is the target, whose keys and
    values of the prompt, in the layers that the drafter is made of, its own cache begins with; it
    reads the answer alone, behind the first token, which the target tells with the prompt. They
    cost nothing, but no other program hands them over."""
    embeddings: Literal["own", "target"] = "own"
    """Whose embeddings and output projection it has. target: its own folder holds none, whoever
    loads it shares the target's, which are most of a shallow drafter's weights. They stay as they
    are; `drafttrain export` writes whole folders for other programs."""


class CausalStart(Config):
    """What a causal drafter starts from: layers of its target, another model, or random weights."""

    layers: Literal["first", "last", "even"] | tuple[NonNegativeInt, ...] = "even"
    """Which of the target's layers it is made of: so many first ones, last ones, or evenly spaced
    ones, the first and the last among them; or a list, counted from 0. Embeddings, final norm and
    output projection are the target's."""
    path: str | None = None
    """A language model with the target's tokens to start from, instead of the target's layers."""
    model: dict[str, Any] | None = None
    """Random weights instead: fields of the Transformers configuration; model_type names the
    family. Vocabulary, special tokens and whether the output is tied are the target's."""


class FollowTargetConfig(Config):
    """The objective of a causal drafter: divergences from the target's rows, each with a weight.

    p is the target's row and q the drafter's, both unwarped, at every token of the target's output.
    """

    cross_entropy: NonNegativeFloat = 0.0
    """Weight of -log q of the output's own token. Alone it trains without a call of the target."""
    forward_kl: NonNegativeFloat = 1.0
    """Weight of KL(p || q) (DistillSpec, Zhou et al. 2024): q covers all that the target may say.
    """
    total_variation: NonNegativeFloat = 0.0
    """Weight of 1 - sum min(p, q): how often rejection sampling rejects a drafted token."""
    lk_adaptive: NonNegativeFloat = 0.0
    """Weight of a KL(p || q) + (1 - a) (1 - sum min(p, q)) with a = exp(-3 sum min(p, q)):
    the KL divergence where p and q hardly overlap, total variation where they do (LK losses)."""
    frozen: tuple[Literal["embeddings", "output"], ...] = ("embeddings", "output")
    """Parts that stay as they start: most of a shallow drafter's weights, few of whose tokens occur
    in few rows. Where the two are tied, either name holds both. Random weights cannot stay: give
    frozen=[] for them."""
    packed_tokens: PositiveInt | None = None
    """Several rows share a sequence of up to so many tokens; each sees itself alone, at positions
    of its own, and the loss is the same. Default: a sequence a row, padded."""


class TeacherConfig(Config):
    """Where the target's rows come from that a drafter learns from."""

    kind: Literal["online", "cached"] = "online"
    """online: the target reads every batch. cached: it reads each distilled answer once; its
    likeliest tokens and their probabilities are kept on disk, and it is called in validation alone.
    """
    top_k: PositiveInt = 48
    """Tokens that are kept at each position, of those that the drafter can draft; all others count
    as one token, with the probability that they have together. All: the same as online."""
    folder: Path | None = None
    """Folder of what is kept, which several runs may share. Default: beside the distilled rows,
    DISTILLED-teacher."""
    dtype: Precision | None = None
    """Of weights and activations while these are worked out: bfloat16 is the faster where the
    processor has products of it. Default: the target's."""


class CausalDrafterRecipe(DistillingRecipe):
    """`recipes/train_causal_drafter.py`: distil the target if need be, then train a language model
    that drafts for it token by token."""

    drafter: CausalDrafterShape = CausalDrafterShape()
    initialise: CausalStart = CausalStart()
    objective: FollowTargetConfig = FollowTargetConfig()
    teacher: TeacherConfig = TeacherConfig()
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""
    train: TrainConfig = TrainConfig()


class ParallelDrafterShape(CausalDrafterShape):
    """The shape of a language model that drafts a block in one call (PARD)."""

    k: int = Field(default=8, ge=2)
    """Tokens drafted in a call: the last committed token predicts the first, each of k - 1 masks
    another one."""
    mask_token: NonNegativeInt | None = None
    """Token of the vocabulary that stands for a mask (`pard_token` in config.json): one that texts
    do not hold, neither the end nor the padding. Default: the tokenizer's own mask, else an id
    without a token, a special token or any other, the last one that no distilled row holds."""


class FollowInBlocksConfig(FollowTargetConfig):
    """The objective of a parallel drafter: that of a causal one, at every token of every block.

    A block begins behind each token of the output's; its first token is learned everywhere, later
    ones in fewer blocks. Their masks count where tokens of batches and of packed sequences do.
    """

    kept: float = Field(default=0.7, gt=0.0, le=1.0)
    """Share of the blocks that have a k-th token: kept^(k - 1), where they have one before it
    (PARD's conditional drop). 1: all."""
    kept_floor: float = Field(default=0.2, ge=0.0, le=1.0)
    """The least that this share falls to."""


class ParallelDrafterRecipe(CausalDrafterRecipe):
    """`recipes/train_parallel_drafter.py`: distil the target if need be, then train a language
    model that drafts several tokens in one call."""

    drafter: ParallelDrafterShape = ParallelDrafterShape()
    objective: FollowInBlocksConfig = FollowInBlocksConfig()


class StateDrafterShape(Config):
    """The shape of a drafter behind its target's own states."""

    k: PositiveInt = 4
    """Tokens drafted in a round."""
    drafts: Literal["blocks", "tokens"] = "blocks"
    """blocks: all of them in one call. tokens: one a call, which knows the one before it."""
    previous_token_rank: NonNegativeInt = 256
    """Rank of the features by which a slot of a block is told the token drafted before it; 0: it
    is told none. Drafts of tokens know theirs without."""
    layers: tuple[NonNegativeInt, ...] | None = None
    """The target's layers that it is made of, counted from 0; in their places it reads the target's
    keys and values. Default: the last two."""
    states: tuple[int, ...] | None = None
    """Layers of the target whose outputs it is fed, counted from 0; -1: the last hidden state.
    Default: one at a quarter, one at two thirds of the depth, the one in front of `layers`, and -1.
    """
    output_tokens: PositiveInt | None = None
    """Tokens that it can draft: the ends of outputs, then those that occur most often in the
    distilled outputs. The output projection is most of what a block costs; outputs stay exact.
    Default: all."""


class StateStart(Config):
    """What a state drafter starts from, beside the target's layers."""

    tokens: PositiveInt = 60_000
    """Tokens of the distilled outputs, at most, along which the maps of states and token to what
    the layers are fed are fitted by least squares; the target reads them once."""


class StateDrafterRecipe(DistillingRecipe):
    """`recipes/train_state_drafter.py`: distil the target if need be, then train a drafter behind
    its own states."""

    drafter: StateDrafterShape = StateDrafterShape()
    initialise: StateStart = StateStart()
    objective: FollowInBlocksConfig = FollowInBlocksConfig()
    reads_in: Precision | None = None
    """Type of the target's weights and activations while it teaches: bfloat16 is the faster where
    the processor has products of it. Default: the target's."""
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""
    train: TrainConfig = TrainConfig()
