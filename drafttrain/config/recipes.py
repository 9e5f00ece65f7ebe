"""Settings of the training recipes."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from drafttrain.config.base import Config, Count, CountsFor, Few, FewOrZero, Precision, Seed, Width
from drafttrain.config.inputs import DataConfig, LocalPath, Location, TargetConfig

Smoothing = Annotated[float, Field(ge=0.0, lt=1.0)]
Part = Annotated[float, Field(ge=0.0, le=1.0)]
VALIDATION_ROWS = 200
"""Held-out rows used in validation, at most."""
_ANCHORED = CountsFor("drafter.slots=anchored", ("prefix_weight",))
_COPIES = CountsFor("drafter.initialise=encoder|both", ("freeze_embeddings",))
_COPIED = CountsFor("initialise.path=null", ("layers",))
_BLOCKS = CountsFor("drafter.drafts=blocks", ("kept", "kept_floor"))
_NO_TEACHER = CountsFor("teacher=null")


class TrainConfig(Config):
    """The training loop, the same for every objective."""

    epochs: PositiveFloat = 10.0
    """Passes over the data; fractions are allowed."""
    max_steps: Count | None = None
    """Optimizer steps, instead of epochs."""
    batch_tokens: Count = 4096
    """Tokens per batch of a process: rows x longest row, source and output together."""
    accumulation: Count = 1
    """Batches of a process in an optimizer step."""
    learning_rate: PositiveFloat = 5e-4
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    """How the learning rate falls after the warm-up."""
    warmup: NonNegativeFloat = 0.04
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the running means of gradients and of their squares."""
    adam_eps: PositiveFloat = 1e-6
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay; norms and biases have none."""
    clip: PositiveFloat | None = 5.0
    """Gradients are clipped to this norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: forward and backward pass in bfloat16, weights and optimizer state in float32. auto:
    bf16 on a GPU (except with DeepSpeed, which rounds the weights), else fp32."""
    compile: bool = False
    """torch.compile for the trained layers, for GPUs; minutes at the start, losses equal but for
    rounding."""
    workers: FewOrZero | None = None
    """Worker processes that prepare the same batches; 0: none. Default: 2 on a GPU, 0 on a CPU."""
    threads: Few | None = None
    """CPU threads of a process. Default: OMP_NUM_THREADS if it is set (more than 1 for `accelerate
    launch`), else the available cores divided by the number of processes on the machine."""
    seed: Seed = 0
    """Seed of every random choice."""
    validate_every: Count = 500
    """Steps between validations."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""
    average: Few = 1
    """Number of last checkpoints whose weights are averaged into final/ (SpecDec: 10)."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers that receive the metrics in addition to metrics.jsonl."""
    log_every: Count = 20
    """Steps between logged losses."""


class Recipe(Config):
    """Settings shared by all recipes."""

    run: LocalPath
    """Folder of the run: checkpoints, run.yaml, metrics.jsonl and final/."""
    data: DataConfig
    """Training inputs; a target trained from scratch also needs references."""
    held_out: DataConfig | None = None
    """Inputs for validation, at most 200 of them, and for a bare `drafttrain eval` or `tune`."""
    train: TrainConfig = TrainConfig()


class DistillingRecipe(Recipe):
    """Settings shared by recipes that learn from a target's outputs, distilled if missing."""

    target: TargetConfig
    distill: dict[str, Any] = {}
    """Settings of `drafttrain distill` (method, sampling, batch_tokens, ...). For drafters its
    target.dtype=bfloat16 applies only to generating the target's outputs."""
    distilled: LocalPath | None = None
    """Folder of distilled shards; missing ones are generated. Default: RUN/distilled."""


class DrafterConfig(Config):
    """A Spec-Drafter (SpecDec Section 3.1): a model of the target's family with other depths."""

    encoder: Literal["own", "target"] | None = None
    """own: a separate encoder, as in the paper. target: it reads the target's encoder states
    (ours), which saves an encoder pass. Default: own for texts, target for audio."""
    encoder_layers: Few | None = None
    """Layers of a separate encoder. Default: as many as the target's encoder."""
    source_pooling: Few = 1
    """Number of neighbouring target encoder states that are averaged into one (ours), for speed; 4
    states of a speech encoder are 80 ms."""
    decoder_layers: Few = 2
    """Decoder layers; few, since the decoder runs once per round (Latency Principle)."""
    k: Few = 10
    """Draft tokens per round in training."""
    slots: Literal["anchored", "paper"] = "anchored"
    """anchored: the last committed token predicts the next one, k - 1 masks follow. paper: k masks
    after the accepted prefix, slot i predicts token i."""
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    """causal: the prefix does not see the masks, so its keys and values are cached between rounds.
    bidirectional (the paper): prefix and masks see each other; every round recomputes both."""
    initialise: Literal["none", "encoder", "both"] = "both"
    """Parts that are initialised from the target's weights."""
    overrides: Annotated[dict[str, Any], CountsFor("initialise=none")] = {}
    """Fields of the model configuration that differ from the target's, such as {d_model: 1024}."""
    output_tokens: Count | Literal["used"] | None = None
    """Number of tokens that it can draft (ours): the most frequent ones of the distilled outputs;
    used: all that occur there. Fewer are cheaper, outputs stay exact. Default: all."""
    previous_token_rank: Annotated[int, Field(ge=0, le=2**16)] = 128
    """Rank of the previous-token features: corrections of each slot by the token drafted before it
    (ours); 0: off, as in the paper."""
    dropout: Smoothing = 0.1
    """Dropout in training."""


class ObjectiveConfig(Config):
    """The mask-predict objective with glancing (SpecDec Section 3.1.3)."""

    blocks: Few = 2
    """Masked blocks drawn from each sentence per step (the paper: 1)."""
    label_smoothing: Smoothing = 0.1
    """Share of the target probability that is spread over the whole vocabulary."""
    glancing_start: Part = 0.5
    """Share of the wrongly predicted slots that is revealed, at the first step."""
    glancing_end: Part = 0.3
    """The same at the last step; linear between. Both 0: no glancing, and no first pass."""
    prefix_weight: NonNegativeFloat = 0.5
    """Weight of the next-token loss on prefix positions (anchored slots only)."""
    freeze_embeddings: bool = False
    """Do not train embeddings and output projection, most weights if the vocabulary is large."""


class SpecDrafterRecipe(DistillingRecipe):
    """`recipes/train_spec_drafter.py`: distils the target if needed, then trains a drafter."""

    drafter: DrafterConfig = DrafterConfig()
    objective: Annotated[ObjectiveConfig, _ANCHORED, _COPIES] = ObjectiveConfig()


class BlockHeadsShape(Config):
    """Shape of block heads (Blockwise Decoding)."""

    k: int = Field(default=25, ge=2, le=1024)
    """Tokens per block: the target's next token and one from each of k - 1 heads."""
    ffn_size: Width | None = None
    """Width of each head's hidden layer. Default: that of the target's last hidden state."""


class PredictAheadConfig(Config):
    """The objective of block heads: predict later tokens of the target's output."""

    positions: Few = 8
    """Positions of each output drawn per step for the first head; head j gets 1/j of them."""


class BlockHeadsRecipe(DistillingRecipe):
    """`recipes/train_block_heads.py`: distils the target if needed, then trains heads on it."""

    drafter: BlockHeadsShape = BlockHeadsShape()
    objective: PredictAheadConfig = PredictAheadConfig()


class HeadConfig(Config):
    """Acceptance heads to train together: every depth with every rejection weight."""

    depths: tuple[FewOrZero, ...] = Field((3,), min_length=1)
    """D: residual blocks before the last linear layer."""
    rejection_weights: tuple[PositiveFloat, ...] = Field((6.0,), min_length=1)
    """w_rej: weight of rejections in the loss; acceptances weigh 1."""


def _final_of_run(drafter: str) -> str:
    folder = Path(drafter)
    is_run = (folder / "run.yaml").is_file() and (folder / "final").is_dir()
    return str(folder / "final") if is_run else drafter


class HeadRecipe(DistillingRecipe):
    """`recipes/train_acceptance_head.py`: distils and caches if needed, then trains heads."""

    drafter: Annotated[Location, AfterValidator(_final_of_run)]
    """Folder or Hub name of the drafter, or the run that trained it (RUN means RUN/final)."""
    cache: dict[str, Any] = {}
    """Settings of `drafttrain cache` (mixing, mixes, dtype, ...)."""
    heads: HeadConfig = HeadConfig()


class TargetRecipe(Recipe):
    """`recipes/train_target.py`: trains a small target, or a drafter that learns from a teacher."""

    model: dict[str, Any]
    """Fields of the Transformers configuration; model_type names the family."""
    teacher: TargetConfig | None = None
    """For drafters: a target whose distribution is learned instead of the references' tokens."""
    vocab_size: Annotated[Count, _NO_TEACHER] = 4000
    """Size of the BPE vocabulary trained on the data; with a teacher its tokenizer is used."""
    save_dtype: Precision = "float32"
    """Type of the weights in final/."""
    label_smoothing: Annotated[Smoothing, _NO_TEACHER] = 0.1
    """Share of the target probability that is spread over the whole vocabulary."""
    max_tokens: Count = 96
    """Pairs with a longer side (decoder-only: longer together) are skipped and counted."""


class CausalDrafterShape(Config):
    """Shape of a language model that drafts for a decoder-only target."""

    drafts: Literal["tokens", "blocks"] = "tokens"
    """tokens: one call per draft token. blocks: one call for k tokens (PARD): the last committed
    token predicts the first one, k - 1 masks the others."""
    layers: Few = 2
    """Number of layers, if it starts from the target's layers."""
    k: Few = 5
    """Draft tokens per block, per round in validation, and in an export's settings."""
    output_tokens: Count | None = None
    """Number of tokens that it can draft: EOS tokens, then the most frequent ones of the distilled
    outputs; in an export the others never win. Outputs stay exact. Default: all."""
    embeddings: Literal["own", "target"] = "own"
    """Embeddings and output projection. target: the target's, frozen and not stored with the
    drafter; `drafttrain export` writes complete folders for other programs."""


class CausalStart(Config):
    """Initial weights of a causal drafter: layers of its target, or another model."""

    layers: Annotated[Literal["even"] | tuple[FewOrZero, ...], CountsFor("path=null")] = "even"
    """Target layers that are copied, evenly spaced or listed from 0; so are embeddings, final norm
    and output projection."""
    path: Location | None = None
    """A language model with the target's vocabulary to start from, instead of these layers."""


class FollowTargetConfig(Config):
    """The objective of a drafter: divergences from the target's rows, each with a weight.

    p is the target's row and q the drafter's, both unwarped, at every token of the target's output.
    A block begins after each token of the output; its first token is learned everywhere, later ones
    in fewer blocks. Masks count as tokens of batches and packed sequences.
    """

    forward_kl: NonNegativeFloat = 1.0
    """Weight of KL(p || q) (DistillSpec, Zhou et al. 2024)."""
    total_variation: NonNegativeFloat = 0.0
    """Weight of 1 - sum min(p, q): how often rejection sampling rejects a draft token."""
    frozen: tuple[Literal["embeddings", "output"], ...] = ("embeddings", "output")
    """Parts that are not trained; if tied, either name freezes both. Random weights need []."""
    packed_tokens: Count | None = None
    """Pack rows, which do not see each other, into sequences of this many tokens; the loss is the
    same. Default: one row per sequence, padded."""
    kept: float = Field(default=0.7, gt=0.0, le=1.0)
    """Share of blocks trained at their k-th token: kept^(k - 1) (PARD's conditional drop)."""
    kept_floor: Part = 0.2
    """Lower bound of this share."""


class TeacherConfig(Config):
    """How the target's distributions, from which a drafter learns, are computed."""

    kind: Literal["online", "cached"] = "online"
    """online: the target runs on every batch. cached: it runs once on each distilled output, and
    its most likely tokens and their probabilities are stored in the folder DISTILLED-teacher."""
    top_k: Annotated[Count, CountsFor("kind=cached")] = 48
    """Tokens stored at each position; all others are one token. All of them: equal to online."""


class CausalDrafterRecipe(DistillingRecipe):
    """`recipes/train_causal_drafter.py`: distils if needed, then trains a language model."""

    drafter: Annotated[CausalDrafterShape, _COPIED] = CausalDrafterShape()
    initialise: CausalStart = CausalStart()
    objective: Annotated[FollowTargetConfig, _BLOCKS] = FollowTargetConfig()
    teacher: TeacherConfig = TeacherConfig()
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""


class StateDrafterShape(Config):
    """Shape of a drafter that reads its target's keys, values and hidden states."""

    k: Few = 4
    """Draft tokens per round."""
    previous_token_rank: int = Field(default=256, ge=0, le=2**16)
    """Rank of the previous-token features of its slots; 0: none."""
    layers: tuple[FewOrZero, ...] | None = None
    """Target layers, from 0, that are copied and whose KV cache it reads. Default: the last two."""
    states: tuple[Annotated[int, Field(ge=-1, le=1024)], ...] | None = None
    """Target layers, from 0, whose outputs are its inputs; -1: the last hidden state. Default: at a
    quarter and at two thirds of the depth, the one before `layers`, and -1."""
    output_tokens: Count | None = None
    """Number of tokens that it can draft, as for causal drafters. Default: all."""


class StateDrafterRecipe(DistillingRecipe):
    """`recipes/train_state_drafter.py`: distils if needed, then trains a drafter that reads the
    target's states."""

    drafter: StateDrafterShape = StateDrafterShape()
    objective: FollowTargetConfig = FollowTargetConfig()
    save_dtype: Precision = "float32"
    """Type of the weights in start/ and final/."""
