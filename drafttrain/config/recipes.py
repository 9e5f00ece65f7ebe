"""Settings of the training recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from drafttrain.config.base import Config, Precision
from drafttrain.config.inputs import DataConfig, TargetConfig


class DrafterConfig(Config):
    """The shape of a Spec-Drafter (SpecDec Section 3.1). Vocabulary, positions, norm and activation
    follow the target it is for."""

    encoder: Literal["own", "target"] | None = None
    """target: none of its own; it reads what the target's encoder puts out (ours), so a round costs
    its decoder alone. Where it starts from the target's decoder, keys and values of cross-attention
    stay the target's too. Default: own for texts, as in the paper; target where inputs are audio.
    """
    encoder_layers: PositiveInt | None = None
    """Of an encoder of its own. Default: as many as the target's."""
    source_pooling: PositiveInt = 1
    """States of the target's encoder that it reads as one, their mean (ours): a speech encoder puts
    out 50 a second, so 4 are 80 ms. A round and a training step get cheaper."""
    d_model: PositiveInt | None = None
    """Width. Default: the target's. Another one needs initialise=none; heads keep their size then,
    and feed-forward layers their ratio to the width, where the next two do not say otherwise."""
    attention_heads: PositiveInt | None = None
    """Heads that share the width. Default: see d_model. Another number needs initialise=none."""
    ffn_dim: PositiveInt | None = None
    """Inner width of feed-forward layers. Default: see d_model. Another one needs initialise=none.
    """
    decoder_layers: PositiveInt = 2
    """Shallow: the decoder runs once a round (Latency Principle)."""
    k: PositiveInt = 10
    """Tokens drafted in a round, in training."""
    slots: Literal["anchored", "paper"] = "anchored"
    """anchored: the last committed token's position predicts the next token, k - 1 masks follow.
    paper: k masks after the accepted prefix, slot i predicts token i."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    """causal: the prefix sees itself only, so its keys and values are cached between rounds.
    bidirectional (the paper): prefix and masks see each other; every round recomputes both."""
    slot_attention: Literal["bidirectional", "causal"] = "bidirectional"
    """bidirectional (the paper): the slots of a block see each other, so all k are fed in training,
    also those behind the sentence's end. causal (ours): they see those before them, so a shorter
    draft is the beginning of a longer one, and training fills the places of slots behind the end
    with further blocks."""
    feeds_first: bool = False
    """Whether a draft takes two calls (ours): the first reads the prefix and drafts a token, the
    second is fed that token and k - 2 masks, so that they know it in every layer."""
    target_states: bool = False
    """Whether committed tokens are told the target's last hidden state that they were predicted
    from (ours, after EAGLE). In training the target's decoder reads every batch too; the drafter is
    for this target alone."""
    initialise: Literal["none", "encoder", "both"] = "both"
    """Which parts start from the target's weights."""
    output_tokens: PositiveInt | Literal["used"] | None = None
    """Tokens that it can draft (ours): those that occur most often in the distilled outputs, then
    the first of the vocabulary, which BPE orders by frequency; used: all that occur there. Fewer
    make training and slots cheaper, most of all where the vocabulary is large; outputs stay exact.
    Default: all."""
    slot_weights: Literal["shared", "own"] = "shared"
    """own: the decoder multiplies masks with other weights than tokens (ours); both start from the
    target's. A round reads twice the weights of its layers. See objective.freeze_tokens."""
    previous_token_rank: NonNegativeInt = 128
    """Width of a correction that tells each slot the token before it, left to right over the block
    (ours); 0: off, as in the paper."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of activations that are zeroed in training."""


class ObjectiveConfig(Config):
    """The mask-predict objective with glancing (SpecDec Section 3.1.3)."""

    blocks: PositiveInt = 2
    """Masked blocks drawn from each sentence in a step (the paper: 1)."""
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the target probability that is spread over the whole vocabulary."""
    glancing_start: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the wrongly predicted slots that is revealed, at the first step."""
    glancing_end: float = Field(default=0.3, ge=0.0, le=1.0)
    """The same at the last step; linear between. Both 0: no glancing, and no first pass."""
    prefix_weight: NonNegativeFloat = 0.5
    """Weight of the next-token loss on prefix positions (anchored slots only)."""
    position_decay: PositiveFloat | None = None
    """Slot i weighs exp(-(i - 1) / position_decay); None: all alike, as in the paper."""
    freeze_embeddings: bool = False
    """Whether embeddings and output rows stay as they start: most weights of a large vocabulary,
    few of whose tokens occur in few rows. Needs initialise=encoder or both."""
    freeze_tokens: bool = False
    """Whether the weights that tokens are multiplied with stay the target's: the first slot is then
    as right as the target, and only the others are learned. Needs drafter.slot_weights=own,
    drafter.encoder=target, and all of the target's decoder_layers."""
    copied_rate: PositiveFloat = 1.0
    """Learning rate of the weights that start from the target's, as a share of that of the others
    (ours): they know the first slot, which much change unlearns."""
    total_variation: NonNegativeFloat = 0.0
    """Weight of the total variation between each row and the target's own there, which is how often
    sampling rejects a token (ours). Not 0: the target reads every batch too."""


class TrainConfig(Config):
    """The training loop, the same for every objective."""

    epochs: PositiveFloat = 10.0
    """Passes over the data; may be a fraction."""
    max_steps: PositiveInt | None = None
    """Optimizer steps, instead of epochs."""
    batch_tokens: PositiveInt = 4096
    """Tokens (rows x longest row, source and output together) in a batch of a process."""
    accumulation: PositiveInt = 1
    """Batches a process adds up before an optimizer step."""
    learning_rate: PositiveFloat = 5e-4
    """The highest one, reached at the end of the warm-up."""
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    """How the learning rate falls after the warm-up."""
    warmup: NonNegativeFloat = 0.04
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's shares of the past in its running means of gradients and of their squares."""
    adam_eps: PositiveFloat = 1e-6
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's; norms and biases have none."""
    clip: PositiveFloat | None = 5.0
    """Largest gradient norm."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward in bfloat16, weights and optimizer in float32."""
    threads: PositiveInt | None = None
    """CPU threads of a process. Default: what you set OMP_NUM_THREADS to, at most the cores it may
    use, shared among the processes of this machine; all of these where you set nothing (the 1 that
    `accelerate launch` sets then does not count)."""
    seed: int = 0
    """Seed of every random choice."""
    validate_every: PositiveInt = 500
    """Steps between validations."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints."""
    average: PositiveInt = 1
    """Weights of the last n checkpoints averaged into final/ (the paper: 10)."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Where metrics go besides metrics.jsonl."""
    log_every: PositiveInt = 20
    """Steps between logged losses."""


class DistillingRecipe(Config):
    """What recipes share that distil the target if need be, then train on its outputs."""

    run: Path
    """Folder of the run: checkpoints, run.yaml, metrics.jsonl and final/."""
    target: TargetConfig
    data: DataConfig
    """Training inputs, distilled where the shards are missing."""
    held_out: DataConfig | None = None
    """Inputs for validation and for a bare `drafttrain eval`."""
    distilled: Path | None = None
    """Folder of distilled shards; default RUN/distilled."""
    distill: dict[str, Any] = {}
    """Settings of `drafttrain distill` (method, batch_tokens, ...); target.dtype=bfloat16 has the
    target answer in bfloat16, where that is faster, though training takes its exact weights."""
    validation_rows: PositiveInt = 500
    """Held-out rows used in validation."""


class SpecDrafterRecipe(DistillingRecipe):
    """`recipes/train_spec_drafter.py`: distil the target if need be, then train a drafter."""

    encoded: Path | None = None
    """Folder of what the target's encoder makes of clips, which several runs may share. Default:
    RUN/encoded."""
    drafter: DrafterConfig = DrafterConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig = TrainConfig()


class BlockHeadsShape(Config):
    """The shape of block heads (Blockwise Decoding)."""

    k: int = Field(default=25, ge=2)
    """Tokens of a block: the target's own next token, and one of each of k - 1 heads."""
    ffn_size: PositiveInt | None = None
    """Width of each head's hidden layer. Default: that of the target's last hidden state."""


class PredictAheadConfig(Config):
    """The objective of block heads: later tokens of the target's own output."""

    positions: PositiveInt = 8
    """Positions of each output that the first head learns from in a step, drawn at random; head j
    has a j-th of them, one at least, or all where there are fewer."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the target probability that is spread over the whole vocabulary."""


class BlockHeadsRecipe(DistillingRecipe):
    """`recipes/train_block_heads.py`: distil the target if need be, then train heads on it."""

    drafter: BlockHeadsShape = BlockHeadsShape()
    objective: PredictAheadConfig = PredictAheadConfig()
    train: TrainConfig = TrainConfig()


class HeadConfig(Config):
    """The acceptance heads to train, all at once: every depth with every weight."""

    depths: tuple[NonNegativeInt, ...] = (3,)
    """D: residual blocks before the last linear layer."""
    rejection_weights: tuple[PositiveFloat, ...] = (6.0,)
    """w_rej: weight of rejections in the loss; acceptances weigh 1."""


class HeadRecipe(Config):
    """`recipes/train_acceptance_head.py`: distil and cache if need be, then train heads."""

    run: Path
    """Folder of the run: checkpoints, run.yaml, metrics.jsonl and final/ with a folder a head."""
    target: TargetConfig
    drafter: str
    """Folder or Hub name of the drafter, or the run that made it (RUN is RUN/final)."""
    data: DataConfig
    """Training prompts."""
    held_out: DataConfig | None = None
    """Prompts for validation, and for choosing heads and h."""
    distill: dict[str, Any] = {}
    """Settings of `drafttrain distill` (method, sampling, batch_tokens, ...)."""
    cache: dict[str, Any] = {}
    """Settings of `drafttrain cache` (mixing, mixes, dtype, ...)."""
    heads: HeadConfig = HeadConfig()
    train: TrainConfig = TrainConfig()

    @field_validator("drafter")
    @classmethod
    def _of_run(cls, drafter: str) -> str:
        folder = Path(drafter)
        is_run = (folder / "run.yaml").is_file() and (folder / "final").is_dir()
        return str(folder / "final") if is_run else drafter


class TargetRecipe(Config):
    """`recipes/train_target.py`: a small target from scratch, or a drafter that follows one."""

    run: Path
    """Folder of the run: checkpoints, run.yaml, metrics.jsonl and final/."""
    data: DataConfig
    """Inputs and references to train on."""
    held_out: DataConfig | None = None
    """The same for validation."""
    model: dict[str, Any]
    """Fields of the Transformers configuration; model_type names the family."""
    tokenizer: str | None = None
    """Existing tokenizer; default: the teacher's, else a BPE trained on the data."""
    teacher: TargetConfig | None = None
    """A target whose distribution over each reference's tokens is learned, instead of the tokens:
    for drafters. It reads every batch too, without gradient."""
    vocab_size: PositiveInt = 4000
    """Size of the BPE trained on the data."""
    save_dtype: Precision = "float32"
    """Type of the weights in final/."""
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the target probability that is spread over the whole vocabulary."""
    max_tokens: PositiveInt = 96
    """Pairs with more tokens (encoder-decoder: on either side; decoder-only: in both together)
    are left out, and counted."""
    validation_rows: PositiveInt = 500
    """Held-out rows used in validation."""
    train: TrainConfig = TrainConfig()
