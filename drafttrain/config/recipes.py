"""Settings of the training recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from drafttrain.config.base import Config, Count, CountsFor, Few, FewOrZero, Precision, Seed, Width
from drafttrain.config.inputs import DataConfig, TargetConfig

Smoothing = Annotated[float, Field(ge=0.0, lt=1.0)]
Part = Annotated[float, Field(ge=0.0, le=1.0)]

VALIDATION_ROWS = 200
"""Held-out rows used in validation, at most."""


class TrainConfig(Config):
    """The training loop, the same for every objective."""

    epochs: PositiveFloat = 10.0
    """Passes over the data; may be a fraction."""
    max_steps: Count | None = None
    """Optimizer steps, instead of epochs."""
    batch_tokens: Count = 4096
    """Tokens (rows x longest row, source and output together) in a batch of a process."""
    accumulation: Count = 1
    """Batches of a process in an optimizer step."""
    learning_rate: PositiveFloat = 5e-4
    """The highest one, at the end of the warm-up."""
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    """How the learning rate falls after the warm-up."""
    warmup: NonNegativeFloat = 0.04
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the running means of gradients and of their squares."""
    adam_eps: PositiveFloat = 1e-6
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's; norms and biases have none."""
    clip: PositiveFloat | None = 5.0
    """Largest gradient norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: forward and backward in bfloat16, weights and optimizer in float32. auto: bf16 on a GPU
    but under DeepSpeed, which rounds weights; else fp32."""
    compile: bool = False
    """Compile the layers that are trained (torch.compile): for GPUs, and minutes at the start. One
    graph serves batches of all lengths; losses are the same, but for rounding."""
    workers: FewOrZero | None = None
    """Processes that make batches ahead of the steps; 0: made between steps. Batches are the same.
    Default: 2 on a GPU, 0 on a CPU, whose cores all train."""
    threads: Few | None = None
    """CPU threads of a process. Default: OMP_NUM_THREADS if you set it, at most the cores it may
    use, shared among the processes of this machine; else all of these."""
    seed: Seed = 0
    """Seed of every random choice."""
    validate_every: Count = 500
    """Steps between validations."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""
    average: Few = 1
    """Weights of the last n checkpoints averaged into final/ (the paper: 10)."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Where metrics go besides metrics.jsonl."""
    log_every: Count = 20
    """Steps between logged losses."""


class Recipe(Config):
    """What all recipes share."""

    run: Path
    """Folder of the run: checkpoints, run.yaml, metrics.jsonl and final/."""
    data: DataConfig
    """Training inputs; for a target from scratch with references."""
    held_out: DataConfig | None = None
    """Inputs for validation, at most 200 of them, and for a bare `drafttrain eval` or `tune`."""
    train: TrainConfig = TrainConfig()


class TargetedRecipe(Recipe):
    """What recipes share that learn from a target's outputs."""

    target: TargetConfig
    distill: dict[str, Any] = {}
    """Settings of `drafttrain distill` (method, sampling, batch_tokens, ...). For drafters its
    target.dtype=bfloat16 counts for the target's answers alone."""


class DistillingRecipe(TargetedRecipe):
    """What recipes of drafters share, which distil the target if need be."""

    distilled: Path | None = None
    """Folder of distilled shards, made where they are missing. Default: RUN/distilled."""


class DrafterConfig(Config):
    """A Spec-Drafter (SpecDec Section 3.1): a model of the target's family with other depths."""

    encoder: Literal["own", "target"] | None = None
    """own: an encoder of its own, as in the paper. target: it reads the target's encoder states
    (ours), so a round costs its decoder alone. Default: own for texts, target for audio."""
    encoder_layers: Few | None = None
    """Layers of its own encoder. Default: the target's number."""
    source_pooling: Few = 1
    """Target encoder states averaged into one (ours): of a speech encoder's 50 a second, 4 are 80
    ms. Rounds and training steps get cheaper."""
    decoder_layers: Few = 2
    """Decoder layers, few: the decoder runs once a round (Latency Principle)."""
    k: Few = 10
    """Draft tokens of a round, in training."""
    slots: Literal["anchored", "paper"] = "anchored"
    """anchored: the last committed token predicts the next one, k - 1 masks follow. paper: k masks
    after the accepted prefix, slot i predicts token i."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    """causal: the prefix does not see the masks, so its keys and values are cached between rounds.
    bidirectional (the paper): prefix and masks see each other; every round recomputes both."""
    slot_attention: Literal["bidirectional", "causal"] = "bidirectional"
    """bidirectional (the paper): the slots of a block see each other. causal (ours): they see
    earlier slots only, so a shorter draft is the start of a longer one."""
    target_states: bool = False
    """Feed the target's last hidden state for each committed token (ours, after EAGLE). The drafter
    is then for this target alone, whose decoder reads every training batch."""
    initialise: Literal["none", "encoder", "both"] = "both"
    """Parts that start from the target's weights."""
    overrides: dict[str, Any] = {}
    """Fields of the family's configuration that differ from the target's, as {d_model: 1024}. Needs
    initialise=none."""
    output_tokens: Count | Literal["used"] | None = None
    """Tokens that it can draft (ours), the most frequent of the distilled outputs; used: all that
    occur there. Fewer make training and drafting cheaper; outputs stay exact. Default: all."""
    previous_token_rank: Annotated[int, Field(ge=0, le=2**16)] = 128
    """Rank of the previous-token features: a correction of each slot by the token drafted before it
    (ours); 0: off, as in the paper."""
    dropout: Smoothing = 0.1
    """Share of activations that are zeroed in training."""


class ObjectiveConfig(Config):
    """The mask-predict objective with glancing (SpecDec Section 3.1.3)."""

    blocks: Few = 2
    """Masked blocks drawn from each sentence in a step (the paper: 1)."""
    label_smoothing: Smoothing = 0.1
    """Share of the target probability that is spread over the whole vocabulary."""
    glancing_start: Part = 0.5
    """Share of the wrongly predicted slots that is revealed, at the first step."""
    glancing_end: Part = 0.3
    """The same at the last step; linear between. Both 0: no glancing, and no first pass."""
    prefix_weight: NonNegativeFloat = 0.5
    """Weight of the next-token loss on prefix positions (anchored slots only)."""
    position_decay: PositiveFloat | None = None
    """Slot i weighs exp(-(i - 1) / position_decay). Default: all weigh the same (paper)."""
    freeze_embeddings: bool = False
    """Keep embeddings and output weights as they start: most weights where the vocabulary is large.
    Needs initialise=encoder or both."""
    copied_rate: PositiveFloat = 1.0
    """Learning rate of weights copied from the target, as a share of that of the others (ours)."""


_ANCHORED = CountsFor("drafter.slots=anchored", ("prefix_weight",))
_COPIES = CountsFor("drafter.initialise=encoder|both", ("copied_rate", "freeze_embeddings"))


class SpecDrafterRecipe(DistillingRecipe):
    """`recipes/train_spec_drafter.py`: distil the target if need be, then train a drafter."""

    drafter: DrafterConfig = DrafterConfig()
    objective: Annotated[ObjectiveConfig, _ANCHORED, _COPIES] = ObjectiveConfig()


class BlockHeadsShape(Config):
    """The shape of block heads (Blockwise Decoding)."""

    k: int = Field(default=25, ge=2, le=1024)
    """Tokens of a block: the target's own next token, and one of each of k - 1 heads."""
    ffn_size: Width | None = None
    """Width of each head's hidden layer. Default: that of the target's last hidden state."""


class PredictAheadConfig(Config):
    """The objective of block heads: later tokens of the target's own output."""

    positions: Few = 8
    """Positions of each output drawn for the first head in a step; head j has a j-th of them, one
    at least, or all where there are fewer."""


class BlockHeadsRecipe(DistillingRecipe):
    """`recipes/train_block_heads.py`: distil the target if need be, then train heads on it."""

    drafter: BlockHeadsShape = BlockHeadsShape()
    objective: PredictAheadConfig = PredictAheadConfig()


class HeadConfig(Config):
    """The acceptance heads to train, all at once: every depth with every weight."""

    depths: tuple[FewOrZero, ...] = Field((3,), min_length=1)
    """D: residual blocks before the last linear layer."""
    rejection_weights: tuple[PositiveFloat, ...] = Field((6.0,), min_length=1)
    """w_rej: weight of rejections in the loss; acceptances weigh 1."""


def _final_of_run(drafter: str) -> str:
    folder = Path(drafter)
    is_run = (folder / "run.yaml").is_file() and (folder / "final").is_dir()
    return str(folder / "final") if is_run else drafter


class HeadRecipe(TargetedRecipe):
    """`recipes/train_acceptance_head.py`: distil and cache if need be, then train heads."""

    drafter: Annotated[str, AfterValidator(_final_of_run)]
    """Folder or Hub name of the drafter, or the run that made it (RUN is RUN/final)."""
    cache: dict[str, Any] = {}
    """Settings of `drafttrain cache` (mixing, mixes, dtype, ...)."""
    heads: HeadConfig = HeadConfig()


_NO_TEACHER = CountsFor("teacher=null")


class TargetRecipe(Recipe):
    """`recipes/train_target.py`: a small target from scratch, or a drafter that follows one."""

    model: dict[str, Any]
    """Fields of the Transformers configuration; model_type names the family."""
    teacher: TargetConfig | None = None
    """A target whose distribution is learned instead of the references' tokens, for drafters."""
    vocab_size: Annotated[Count, _NO_TEACHER] = 4000
    """Size of the BPE trained on the data. A teacher's own tokenizer is used."""
    save_dtype: Precision = "float32"
    """Type of the weights in final/."""
    label_smoothing: Annotated[Smoothing, _NO_TEACHER] = 0.1
    """Share of the target probability that is spread over the whole vocabulary."""
    max_tokens: Count = 96
    """Longer pairs (on either side; decoder-only: together) are left out, and counted."""


class CausalDrafterShape(Config):
    """The shape of a drafter that drafts token by token for a decoder-only target."""

    layers: Few = 2
    """Layers, where it starts from the target's."""
    k: Few = 5
    """Draft tokens of a round, in validation and in an export's settings."""
    output_tokens: Count | None = None
    """Tokens that it can draft: the ends of outputs, then the most frequent of the distilled
    outputs; an export gives the others rows that never win. Outputs stay exact. Default: all."""
    embeddings: Literal["own", "target"] = "own"
    """Whose embeddings and output projection it has. target: shared and frozen, its folder holds
    none; `drafttrain export` writes whole folders for other programs."""


class CausalStart(Config):
    """What a causal drafter starts from: layers of its target, or another model."""

    layers: Annotated[Literal["even"] | tuple[FewOrZero, ...], CountsFor("path=null")] = "even"
    """Which of the target's layers it copies: evenly spaced ones, or a list, counted from 0; and
    its embeddings, final norm and output projection."""
    path: str | None = None
    """A language model with the target's tokens to start from, instead of the target's layers."""


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
    frozen: tuple[Literal["embeddings", "output"], ...] = ("embeddings", "output")
    """Parts that stay as they start; where the two are tied, either name holds both. Random weights
    cannot stay: give frozen=[] for them."""
    packed_tokens: Count | None = None
    """Tokens of a sequence that several rows share; each sees itself alone, and the loss is the
    same. Default: a sequence a row, padded."""


_CACHED = CountsFor("kind=cached")


class TeacherConfig(Config):
    """Where the target's rows come from that a drafter learns from."""

    kind: Literal["online", "cached"] = "online"
    """online: the target reads every batch. cached: it reads each distilled answer once; its
    likeliest tokens and their probabilities are kept in the folder DISTILLED-teacher."""
    top_k: Annotated[Count, _CACHED] = 48
    """Tokens kept at each position; all others count as one token. All: the same as online."""


_COPIED = CountsFor("initialise.path=null", ("layers",))


class CausalDrafterRecipe(DistillingRecipe):
    """`recipes/train_causal_drafter.py`: distil the target if need be, then train a language model
    that drafts for it token by token."""

    drafter: Annotated[CausalDrafterShape, _COPIED] = CausalDrafterShape()
    initialise: CausalStart = CausalStart()
    objective: FollowTargetConfig = FollowTargetConfig()
    teacher: TeacherConfig = TeacherConfig()
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""


class ParallelDrafterShape(CausalDrafterShape):
    """The shape of a language model that drafts a block in one call (PARD)."""

    k: int = Field(default=8, ge=2, le=1024)
    """Draft tokens of a call: the last committed token predicts the first, each of k - 1 masks
    another one."""


class FollowInBlocksConfig(FollowTargetConfig):
    """The objective of a parallel drafter: that of a causal one, at every token of every block.

    A block begins after each token of the output; its first token is learned everywhere, later ones
    in fewer blocks. Masks count towards the tokens of batches and of packed sequences.
    """

    kept: float = Field(default=0.7, gt=0.0, le=1.0)
    """Share of the blocks that have a k-th token: kept^(k - 1) (PARD's conditional drop)."""
    kept_floor: Part = 0.2
    """The least that this share falls to."""


class ParallelDrafterRecipe(CausalDrafterRecipe):
    """`recipes/train_parallel_drafter.py`: distil the target if need be, then train a language
    model that drafts several tokens in one call."""

    drafter: Annotated[ParallelDrafterShape, _COPIED] = ParallelDrafterShape()
    objective: FollowInBlocksConfig = FollowInBlocksConfig()


class StateDrafterShape(Config):
    """The shape of a drafter that reads its target's keys, values and hidden states."""

    k: Few = 4
    """Draft tokens of a round."""
    previous_token_rank: int = Field(default=256, ge=0, le=2**16)
    """Rank of the previous-token features of its slots; 0: none."""
    layers: tuple[FewOrZero, ...] | None = None
    """The target's layers that it copies, counted from 0; in their places it reads the target's
    keys and values. Default: the last two."""
    states: tuple[Annotated[int, Field(ge=-1, le=1024)], ...] | None = None
    """Layers of the target whose outputs it is fed, counted from 0; -1: the last hidden state.
    Default: one at a quarter, one at two thirds of the depth, the one before `layers`, and -1."""
    output_tokens: Count | None = None
    """Tokens that it can draft: the ends of outputs, then the most frequent of the distilled
    outputs. Default: all."""


class StateDrafterRecipe(DistillingRecipe):
    """`recipes/train_state_drafter.py`: distil the target if need be, then train a drafter on
    the target's own states."""

    drafter: StateDrafterShape = StateDrafterShape()
    objective: FollowInBlocksConfig = FollowInBlocksConfig()
    reads_in: Precision | None = None
    """Type of the target's weights and activations while it teaches. Default: the target's."""
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""
