"""Settings, one frozen pydantic model per command and recipe; `settings` reads them. No torch here.

A YAML file holds non-default keys; `key=value` on the command line overrides it
(`train.learning_rate=3e-4`). Unknown keys are refused with the nearest name. A default lives here
and nowhere else; the string under each field is its documentation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Precision = Literal["float32", "bfloat16", "float16"]


class ConfigError(ValueError):
    """A setting is wrong. The message names the field, the value and the remedy."""


class Interrupted(Exception):
    """Work was asked to stop and has been saved; the message says where."""


class Config(BaseModel):
    """Base of all settings: frozen, unknown keys refused, docstrings under fields kept."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )


class TargetConfig(Config):
    """The large model whose output is to be reproduced faster."""

    path: str
    """Hub name or local folder of the target model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    dtype: Precision = "float32"
    """Weights and activations while decoding."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    trust_remote_code: bool = False
    """Run Python code that lies beside the model's weights. Off unless you trust its author."""


class DataConfig(Config):
    """Input texts: a Hub name, a local file (json, jsonl, parquet, csv, txt, each also .gz),
    two line-aligned files, or a folder written by `datasets`."""

    path: str
    """Hub name, file or folder of the inputs."""
    reference_path: str | None = None
    """Second file, line-aligned with `path`, that holds the references."""
    config_name: str | None = None
    """Configuration of a Hub data set (wmt14: de-en)."""
    split: str = "train"
    """Split of a Hub data set or `datasets` folder."""
    input_column: str | None = None
    """Column of the inputs, texts or chats. Default: messages (chats), source, prompt, text,
    document or turns (the first of each list), whichever exists."""
    template: str | None = None
    """The input made of a row's columns, instead of one column: "{question} (A) {choices[0]}"."""
    reference_column: str | None = None
    """Column of the references. Default: reference, target, response, summary or
    canonical_solution, if one exists; of chats, the assistant's turn at the end."""
    source_language: str | None = None
    """For rows of {"translation": {LANG: text}}: language of the inputs."""
    target_language: str | None = None
    """For rows of {"translation": {LANG: text}}: language of the references."""
    prefix: str = ""
    """Text put before every input (T5: "translate English to German: ")."""
    suffix: str = ""
    """Text put after every input ("\\nAnswer:")."""
    chat: bool = False
    """Put every text as a user's message through the tokenizer's chat template (decoder-only
    targets). Rows that are chats are rendered with it in any case."""
    where: dict[str, str | int | float | bool] = {}
    """Keep only the rows with these values, as {category: math_reasoning}; skip and limit count
    what is kept."""
    skip: NonNegativeInt = 0
    """Rows to leave out at the start."""
    limit: PositiveInt | None = None
    """Most rows to use."""
    splices: NonNegativeInt = 0
    """For distillation: so many more inputs for each of these, without references, made of two that
    share two words: the start of one, the end of the other. The target answers them all."""


class SamplingConfig(Config):
    """How the target decodes. Temperature 0 is greedy decoding."""

    temperature: NonNegativeFloat = 0.0
    """0: greedy. Otherwise logits are divided by it before sampling."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this."""
    max_new_tokens: PositiveInt = 128
    """Most tokens to generate for an input."""
    seed: int = 0
    """Seed of every random choice."""


class DistillConfig(Config):
    """`drafttrain distill`: the target's own outputs, as Parquet shards with a manifest."""

    target: TargetConfig
    data: DataConfig
    out: Path
    """Folder for the shards and manifest.json."""
    method: Literal["greedy", "beam", "sample"] = "greedy"
    """How the target decodes. Greedy outputs make the drafter agree with greedy decoding."""
    num_beams: PositiveInt = 5
    """Beams, where method is beam."""
    sampling: SamplingConfig = SamplingConfig()
    """Temperature, top-k and top-p count where method is sample; max_new_tokens always."""
    batch_tokens: PositiveInt = 4096
    """Source tokens (rows x longest row) decoded at once by a process. The keys and values of
    these and of the rows' new tokens are held in memory: see --dry-run."""
    shard_rows: PositiveInt = 2048
    """Input rows a shard; a shard is the unit that is written, resumed and shared out."""
    max_source_tokens: PositiveInt = 512
    """Inputs longer than this are skipped and reported by row number."""
    share: str | None = None
    """0/4: write every fourth shard, from number 0 on. For launches that share a folder only."""


class BigramsConfig(Config):
    """`drafttrain bigrams`: which token usually follows each, for drafts by Max-Gram."""

    distilled: Path
    """Folder made by `drafttrain distill`."""
    out: Path
    """The table, a .safetensors file."""


class StopConfig(Config):
    """When a round of drafting ends."""

    kind: Literal["fixed", "entropy", "confidence", "head", "gain"] = "fixed"
    """fixed: always k tokens. head: a trained acceptance head says when a token of the draft was
    probably rejected (SpecDec++). entropy: after a row of high entropy. confidence: after a token
    of low probability (as Transformers does); greedy decoding only. gain: after a level that adds
    little to the expected acceptance of an opt-tree, the default there. None changes the output."""
    k: PositiveInt = 10
    """fixed: tokens drafted in a round; levels of a tree."""
    max_draft: PositiveInt = 20
    """Most tokens (levels of a tree) drafted in a round by the other kinds. Default: policy.json's
    for a head; where one pass drafts a block, the slots that the drafter was trained with."""
    head: str | None = None
    """Folder of the acceptance head. Default: the one beside the drafter, if there is one."""
    h: float | None = Field(default=None, gt=0.0, lt=1.0)
    """head: stop when a rejection is likelier than this. Default: policy.json's, else 0.7."""
    entropy: PositiveFloat = 2.0
    """entropy: stop after a row of more than so many nats."""
    confidence: float = Field(default=0.4, gt=0.0, lt=1.0)
    """confidence: stop after a token of less than this probability."""
    delta: float = Field(default=0.2, ge=0.0, lt=1.0)
    """gain: stop after a level that adds no more expected accepted tokens than this. Useful values
    lie between t_draft / t_target and 1; 0 goes on to max_draft levels."""


STOP_SETTINGS: dict[str, set[str]] = {
    "fixed": {"k"},
    "entropy": {"entropy", "max_draft"},
    "confidence": {"confidence", "max_draft"},
    "head": {"head", "h", "max_draft"},
    "gain": {"delta", "max_draft"},
}
"""Settings that each kind of stop policy goes by."""


class VerifierConfig(Config):
    """How drafted tokens are accepted."""

    kind: Literal[
        "auto",
        "greedy",
        "spec-verification",
        "rejection",
        "multi-round",
        "k-seq",
        "recursive",
        "target-walk",
    ] = "auto"
    """auto: greedy match at temperature 0, above it the rejection rule for the drafts: rejection
    for chains, recursive for rsd-c and rsd-s, k-seq for paths (multi-round with several drafters),
    target-walk for other trees; all are lossless. spec-verification is lossy: it accepts tokens
    among the target's top beta within tau."""
    beta: PositiveInt = 3
    """Spec-Verification: the token must be among the target's top beta."""
    tau: NonNegativeFloat = 1.0
    """Spec-Verification: largest log-probability gap to the target's first choice (nats)."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_leniency(cls, values: Any) -> Any:
        if isinstance(values, dict) and "leniency" in values:
            raise ValueError(
                "leniency of the target's own review, the outermost, would change the output; it "
                "counts inside cascades only: give cascade.leniency"
            )
        return values


TreeKind = Literal["none", "paths", "rsd-c", "rsd-s", "opt-tree", "binary", "eagle", "sequoia"]


class TreeConfig(Config):
    """The shape of draft trees. stop.k is the number of levels."""

    kind: TreeKind = "none"
    """none: chains. paths: independent paths (SpecTr, SpecInfer). rsd-c, rsd-s: without
    replacement, by branching factors or stochastic beam search (RSD). opt-tree: the tree that
    expects the most accepted tokens (OPT-Tree). binary, eagle: fixed trees. sequoia: the best fixed
    tree for measured acceptance by rank. At temperature 0 use opt-tree or a fixed tree: drawn trees
    are chains there, unless draft_temperature is set."""
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
    draft_temperature: PositiveFloat | None = None
    """Temperature of the drafter's rows that tokens are drawn from, or an opt-tree is scored by.
    Default: the target's; 0.5 for an opt-tree where the target is greedy."""


TREE_SETTINGS: dict[str, set[str]] = {
    "none": set(),
    "paths": {"width", "drafters", "draft_temperature"},
    "rsd-c": {"branching", "draft_temperature"},
    "rsd-s": {"width", "draft_temperature"},
    "opt-tree": {"nodes", "head", "draft_temperature"},
    "binary": {"nodes"},
    "eagle": set(),
    "sequoia": {"nodes", "by_rank"},
}
"""Settings that each kind of tree goes by."""


class CascadeConfig(Config):
    """Drafters behind `drafter`, each smaller than the one before it (CS Drafting). A language
    model's drafts are made by reviewing what those behind it say."""

    drafters: tuple[str, ...] = Field(min_length=1)
    """Folders or Hub names, from the largest down, as a rule to `max-gram`."""
    increments: tuple[tuple[NonNegativeInt, ...], ...] | None = None
    """The matrix K, a row for each depth of reviews, as 5,3,0/4,10/10: `drafter` adds 5 tokens to a
    round and the second 3; in the first one's reviews the second adds 4 and the third 10; and so
    on. Default: 5 a model; from max-gram 10 in reviews, none in a round."""
    leniency: float = Field(default=1.0, ge=1.0)
    """l: reviews inside accept up to so many times more than their own distribution would; against
    max-gram, and where the target reviews, it is 1 always. The output stays the target's own."""

    @field_validator("drafters", mode="before")
    @classmethod
    def _split_drafters(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

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
        levels, copies = 1 + len(self.drafters), self.drafters[-1] == "max-gram"
        rows = [[5] * (levels - depth) for depth in range(levels)]
        for row in rows if copies else ():
            row[-1] = 10
        if copies:
            rows[0][-1] = 0
        return tuple(map(tuple, rows))


class DecodeConfig(Config):
    """A method: a drafter, a stop policy and a verifier."""

    drafter: str | None = None
    """Folder or Hub name of the drafter. `none` is plain decoding; `max-gram` copies what followed
    the longest earlier occurrence of the text's end (CS Drafting) and needs no training."""
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


MethodKind = Literal[
    "sd", "spectr", "specinfer", "rsd-c", "rsd-s", "opt-tree", "binary", "eagle", "sequoia"
]


class EvalConfig(Config):
    """`drafttrain eval`: what a drafter is worth on a target and inputs."""

    target: TargetConfig | None = None
    """Default: the target the newest run (or the given drafter) was trained for."""
    data: DataConfig | None = None
    """Default: the held-out rows of the newest run."""
    decode: DecodeConfig = DecodeConfig()
    mode: Literal["decode", "teacher-forced"] = "decode"
    """decode: the truth. teacher-forced: acceptance from one parallel pass, fast."""
    others: dict[str, DecodeConfig] = {}
    """More methods by the names that reports give them, measured in the same interleaved run, with
    the sampling of `decode`: {copied: {drafter: max-gram}, ...}."""
    sweep: dict[str, list[float]] = {}
    """Values to try, for example {k: [5, 10], h: [0.5, 0.7], beta: [3], tau: [1.0, 2.0]}. Every k,
    h, entropy, confidence and delta is a stop policy, measured with the verifier asked for; beta
    and tau add Spec-Verification at each of their pairs."""
    methods: tuple[MethodKind, ...] = ()
    """Methods to compare at the depths and budgets given: sd (a chain), spectr, specinfer, rsd-c,
    rsd-s, opt-tree, binary, eagle, sequoia. Every tree that the RSD paper (Appendix C.3) tries at a
    depth or a budget is measured."""
    depth: tuple[PositiveInt, ...] = ()
    """Levels of the trees compared by `methods`."""
    budget: tuple[PositiveInt, ...] = ()
    """Drafted tokens a round of the trees compared by `methods`."""
    rank_data: DataConfig | None = None
    """Prompts on which acceptance by rank is measured for sequoia; not those reported on."""
    baselines: tuple[Literal["generate", "beam"], ...] = ("generate", "beam")
    """Transformers' own `generate` (greedy or sampling as asked) and beam search."""
    num_beams: PositiveInt = 5
    repeats: PositiveInt = 3
    """Interleaved timing rounds; medians are reported."""
    warmup: NonNegativeInt = 3
    """Inputs decoded by every method before timing starts."""
    bootstrap: PositiveInt = 1000
    """Resamples of the prompts for the 95 % intervals."""
    bleu_tokenizer: str = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char for such outputs."""
    report: Path | None = None
    """Where report.json goes; samples.jsonl and the plot lie beside it."""


class GenerateConfig(Config):
    """`drafttrain generate`: decode texts, with or without a drafter."""

    target: TargetConfig | None = None
    """Default: the target the drafter was trained for."""
    data: DataConfig | None = None
    decode: DecodeConfig = DecodeConfig()


class DrafterConfig(Config):
    """The shape of a Spec-Drafter (SpecDec Section 3.1). Vocabulary, positions, norm and activation
    follow the target it is for."""

    encoder_layers: PositiveInt | None = None
    """Default: as many as the target's encoder."""
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
    initialise: Literal["none", "encoder", "both"] = "both"
    """Which parts start from the target's weights."""
    soft_copy: bool = False
    """Masked slots start from softly copied source embeddings."""
    coupling_rank: NonNegativeInt = 128
    """Width of a correction that tells each slot the token before it, left to right over the block
    (ours); 0: off, as in the paper."""
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)


class ObjectiveConfig(Config):
    """The mask-predict objective with glancing (SpecDec Section 3.1.3)."""

    blocks: PositiveInt = 2
    """Masked blocks drawn from each sentence in a step (the paper: 1)."""
    label_smoothing: float = Field(default=0.1, ge=0.0, lt=1.0)
    glancing_start: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the wrongly predicted slots that is revealed, at the first step."""
    glancing_end: float = Field(default=0.3, ge=0.0, le=1.0)
    """The same at the last step; linear between. Both 0: no glancing, and no first pass."""
    prefix_weight: NonNegativeFloat = 0.5
    """Weight of the next-token loss on prefix positions (anchored slots only)."""
    position_decay: PositiveFloat | None = None
    """Slot i weighs exp(-(i - 1) / position_decay); None: all alike, as in the paper."""
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
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    warmup: NonNegativeFloat = 0.04
    """Linear warm-up: a share of all steps if below 1, else a number of steps."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat | None = 5.0
    """Largest gradient norm."""
    precision: Literal["fp32", "bf16"] = "fp32"
    threads: PositiveInt | None = None
    """CPU threads of a process. Default: the cores it may use, shared among the processes of this
    machine (`accelerate launch` alone would give it one)."""
    seed: int = 0
    validate_every: PositiveInt = 500
    """Steps between validations."""
    checkpoint_every: PositiveInt = 500
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 3
    """Newest checkpoints kept; at least `average` are kept whatever this says."""
    average: PositiveInt = 1
    """Weights of the last n checkpoints averaged into final/ (the paper: 10)."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
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
    """Settings of `drafttrain distill` (method, batch_tokens, ...)."""
    validation_rows: PositiveInt = 500
    """Held-out rows used in validation."""


class SpecDrafterRecipe(DistillingRecipe):
    """`recipes/train_spec_drafter.py`: distil the target if need be, then train a drafter."""

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


class BlockHeadsRecipe(DistillingRecipe):
    """`recipes/train_block_heads.py`: distil the target if need be, then train heads on it."""

    drafter: BlockHeadsShape = BlockHeadsShape()
    objective: PredictAheadConfig = PredictAheadConfig()
    train: TrainConfig = TrainConfig()


class CacheConfig(Config):
    """`drafttrain cache`: what acceptance heads are trained on, computed once.

    Distilled outputs -> a teacher-forced pass of target and drafter -> drafted tokens and how
    likely each is accepted -> the drafter's hidden states at them, as safetensors shards.
    """

    target: TargetConfig
    drafter: str
    """Folder or Hub name of the drafter."""
    distilled: Path
    """Folder of the target's outputs, made by `drafttrain distill`."""
    out: Path
    """Folder for the shards and manifest.json."""
    sampling: SamplingConfig | None = None
    """The warping (temperature, top_k, top_p) that decoding will use; labels are made under it.
    Default: as the outputs were decoded."""
    state: Literal["drawn", "token"] = "drawn"
    """What heads read, where the drafter drafts token by token: what is known when a token is
    drawn, or the hidden state at its own position, a pass later (SpecDec++)."""
    mixing: float | None = Field(default=None, ge=0.0, le=1.0)
    """r, for `token` states: share of positions that keep the target's own token; the others are
    drafted and in the loss (SpecDec++ Section 3.2). Default: 0.15."""
    mixes: PositiveInt = 1
    """R: how often drafted tokens and mixing are drawn anew; epochs cycle over them."""
    dtype: Literal["float32", "float16"] = "float32"
    """Storage of hidden states."""
    seed: NonNegativeInt = 0
    batch_tokens: PositiveInt = 4096
    """Tokens (rows x longest row) in a forward pass."""
    shard_rows: PositiveInt = 512
    """Distilled rows a shard."""
    k: PositiveInt = 10
    """Slots of a block, where the drafter drafts blocks."""
    blocks_per_row: PositiveInt | None = None
    """Blocks drawn from each output, where the drafter drafts blocks. Default: one at every
    prefix."""


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
    """Folder or Hub name of the drafter."""
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


class TuneConfig(Config):
    """`drafttrain tune`: replay one logged trace under every stop policy, and choose."""

    target: TargetConfig | None = None
    """Default: the target of the run that the heads come from."""
    drafter: str | None = None
    """Default: the drafter of that run."""
    heads: Path | None = None
    """A head, or the run of a sweep. Default: the newest run of heads."""
    data: DataConfig | None = None
    """Prompts to choose on. Default: the held-out prompts of the run."""
    report_data: DataConfig | None = None
    """Prompts to report on; never used to choose. Default: report on `data`, and say so."""
    sampling: SamplingConfig | None = None
    """Default: as the heads' labels were made."""
    lengths: tuple[PositiveInt, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14)
    """Fixed draft lengths to compare with."""
    h: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    """Thresholds of the heads."""
    entropy: tuple[PositiveFloat, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    """Thresholds of the entropy policy."""
    max_draft: PositiveInt = 20
    """Most tokens a policy may draft in a round."""
    replicates: PositiveInt = 4
    """How often the coins of acceptance are tossed for each output (sampling only)."""
    timing_prompts: PositiveInt = 20
    """Prompts that are decoded to measure t_draft and t_target."""
    bootstrap: PositiveInt = 1000
    """Resamples of the prompts for the 95 % intervals."""
    report: Path | None = None
    """Where the report goes (JSON); its plots lie beside it. Default: tune.json in the run."""
    policy: Path | None = None
    """Where policy.json goes. Default: beside the chosen head."""


class TuneCascadeConfig(Config):
    """`drafttrain tune-cascade`: the increments and leniency of a cascade, found by replay."""

    target: TargetConfig
    drafter: str
    """Folder or Hub name of the largest drafter."""
    cascade: tuple[str, ...] = Field(min_length=1)
    """Smaller drafters behind it, from the largest down, as a rule to max-gram."""
    bigrams: str | None = None
    """max-gram: table of likeliest successors, made by `drafttrain bigrams`."""
    data: DataConfig
    """Prompts to choose on."""
    report_data: DataConfig | None = None
    """Prompts to report on; never used to choose. Default: report on `data`, and say so."""
    sampling: SamplingConfig = SamplingConfig()
    """How the target decodes; seed also draws the candidates."""
    leniency: tuple[Annotated[float, Field(ge=1.0)], ...] = Field(default=(1.0,), min_length=1)
    """Values of l to try, where a language model reviews another."""
    candidates: int = Field(default=64, ge=2)
    """Matrices to try: the default, the first level alone at some lengths, and random ones."""
    first_prompts: PositiveInt = 8
    """Prompts that all candidates see; the better half sees twice as many, and so on."""
    finalists: PositiveInt = 4
    """Candidates that see all prompts, at least."""
    local: bool = True
    """Then try increments that differ by one or two from the best, on all prompts."""
    costs: Literal["measured", "parameters"] = "measured"
    """What a call of each level costs in target calls: seconds on this machine, or parameters."""
    timing_prompts: PositiveInt = 10
    """Prompts that are decoded to measure costs, by plain decoding and the default cascade."""
    bootstrap: PositiveInt = 1000
    """Resamples of the prompts for the 95 % intervals."""
    out: Path = Path("cascade.yaml")
    """Settings to write, for `drafttrain eval --config`; tune-cascade.json lies beside them."""

    @field_validator("cascade", "leniency", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value


class Policy(Config):
    """policy.json: the stop policy that was chosen for a drafter, and for which decoding.

    It lies beside the acceptance head's folder; other keys in it are facts about the choice.
    """

    model_config = ConfigDict(extra="ignore")

    stop: Literal["fixed", "entropy", "confidence", "head"]
    """As StopConfig.kind, and so are the values below."""
    k: PositiveInt | None = None
    max_draft: PositiveInt = 20
    head: str | None = None
    """Name of the head (D3-w6): its folder in a run of heads."""
    h: float | None = Field(default=None, gt=0.0, lt=1.0)
    entropy: PositiveFloat | None = None
    confidence: float | None = Field(default=None, gt=0.0, lt=1.0)
    sampling: dict[str, float] = {}
    """Temperature, top_k and top_p that it was chosen for; under others the output is as exact."""
    drafter: str | None = None
    """What proposes: in an export the drafter's model_type (spec-drafter, llama, ...)."""
    verifier: VerifierConfig = VerifierConfig()
    """How drafted tokens are accepted; spec-verification counts in greedy decoding only."""


class ExportConfig(Config):
    """`drafttrain export`: a drafter, its head and its policy as one folder for other programs."""

    drafter: str
    """Folder or Hub name of the drafter; a run of recipes/train_spec_drafter.py is its final/."""
    head: Path | None = None
    """Folder of the acceptance head."""
    heads: Path | None = None
    """A run of heads, instead of one head: policy.json in it says which."""
    policy: Path | None = None
    """The policy.json. Default: the one beside the head, if there is one."""
    h: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Stop when a rejection is likelier than this. Default: policy.json's, else 0.7."""
    verifier: VerifierConfig | None = None
    """The verifier in policy.json; kind=spec-verification makes greedy decoding lossy. Default: the
    policy's, else auto (lossless)."""
    target: str | None = None
    """Hub name or folder of the target, for the model card and the check of decoding. Default: as
    the head or the drafter recorded it."""
    license: str | None = None
    """Licence of the drafter, as the Hub names it (apache-2.0, cc-by-4.0, other)."""
    target_license: str | None = None
    """Licence of the target, for the model card: it may bind what was trained from it."""
    training_data: str | None = None
    """What the drafter was trained on, for the model card: a Hub name or words. Default: as its
    run recorded it."""
    data_license: str | None = None
    """Licence of the training data, for the model card."""
    report: Path | None = None
    """Measured numbers for the model card, written by `drafttrain eval` or `drafttrain tune`; the
    plot beside it goes along. Default: report.json in the drafter's run, if there is one."""
    out: Path
    """The folder to write."""
    num_assistant_tokens: PositiveInt | None = None
    """Draft length of Transformers' own assisted generation, and of the commands in the card.
    Default: the policy's k, else 20."""
    assistant_confidence_threshold: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Transformers' own stop in assisted generation; 0: none. Default: 0 for a policy of fixed
    length, else the policy's confidence, else 0.4."""
    check: Literal["auto", "target", "drafter"] = "auto"
    """What is decoded on 20 inputs before the folder gets its name. target: the target with
    custom_generate, against plain greedy `generate` (loads the target). drafter: drafts alone,
    against those of the original. auto: target, where it is a folder on this machine."""
    data: DataConfig | None = None
    """Inputs of that check. Default: the held-out rows of the drafter's run, else random tokens."""
    force: bool = False
    """Replace an earlier export."""
    push: str | None = None
    """Repository on the Hub (USER/NAME) that the verified folder is pushed to."""
    private: bool = False
    """Make that repository private, where it does not exist yet."""


class TargetRecipe(Config):
    """`recipes/train_target.py`: a small target from scratch, or a drafter that follows one."""

    run: Path
    data: DataConfig
    held_out: DataConfig | None = None
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
    max_tokens: PositiveInt = 96
    """Pairs with more tokens (encoder-decoder: on either side; decoder-only: in both together)
    are left out, and counted."""
    validation_rows: PositiveInt = 500
    train: TrainConfig = TrainConfig()
