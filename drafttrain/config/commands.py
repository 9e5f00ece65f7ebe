"""Settings of the commands."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveFloat, PositiveInt

from drafttrain.config.base import Config, Count, CountOrZero, CountsFor, Few, Listed, Seed
from drafttrain.config.decode import DecodeConfig, SamplingConfig, TreeName, VerifierConfig
from drafttrain.config.inputs import DataConfig, LocalPath, Location, TargetConfig
from drafttrain.config.sweep import Swept

DistillMethod = Literal["greedy", "beam", "sample"]
EngineName = Literal["transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp"]
Baseline = Literal["generate", "beam", "assisted"]
Tuned = Literal["k", "h", "entropy", "confidence", "cumulative", "nodes"]
"""Settings that `tune` varies: draft length, stop thresholds and the size of trees."""
Compile = Annotated[
    Literal["off", "auto", "on"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]
"""YAML reads on and off as true and false."""
BatchSizes = Annotated[
    tuple[Count, ...], Listed, AfterValidator(lambda sizes: tuple(sorted({1, *sizes})))
]
"""Batch sizes in ascending order, always including 1."""
_SAMPLED = CountsFor("method=sample", ("temperature", "top_k", "top_p", "min_p"))
_ENGINE = CountsFor("backend=engine", attribute="decoded_by")
_SERVER = CountsFor("backend=server", attribute="decoded_by")
_GENERATE = CountsFor("backend=transformers", attribute="decoded_by")
_OURS = CountsFor("backend=transformers|engine", ("dtype", "device"), "decoded_by")
_TIMED = CountsFor("mode=decode")


class ServerConfig(Config):
    """An OpenAI-compatible server that runs the target in distillation."""

    url: str | None = None
    """Address, such as http://localhost:8000/v1. Its key: OPENAI_API_KEY in the environment."""
    model: str | None = None
    """Name of the target on the server. Default: its only model, or the target's path."""
    concurrency: Few = 32
    """Number of concurrent requests, one row each."""
    extra_body: dict[str, bool | int | float | str] = {}
    """Additional fields of each request, such as {top_k: -1, return_token_ids: true} for vLLM."""


class DistillConfig(Config):
    """`drafttrain distill`: outputs of the target as Parquet shards with a manifest."""

    target: Annotated[TargetConfig, _OURS]
    data: DataConfig
    out: LocalPath
    """Folder for the shards and manifest.json. Encoder states of clips are kept next to it."""
    method: DistillMethod = "greedy"
    """How the target decodes. Greedy outputs make the drafter agree with greedy decoding."""
    backend: Literal["auto", "transformers", "engine", "server"] = "auto"
    """Backend that decodes. transformers: its `generate`. engine: that of `drafttrain generate`.
    server: an OpenAI-compatible server, for decoder-only targets. auto: server if server.url is
    given; for many outputs without beams the faster of the other two, unless batch_tokens is given;
    else transformers."""
    server: Annotated[ServerConfig, _SERVER] = ServerConfig()
    """Address and requests of the server backend."""
    num_beams: Annotated[Few, CountsFor("method=beam")] = 5
    """Number of beams, if method is beam."""
    sampling: Annotated[SamplingConfig, _SAMPLED] = SamplingConfig()
    """Temperature, top-k and top-p are used if method is sample; max_new_tokens always."""
    batch_tokens: Annotated[Count, _GENERATE] = 4096
    """transformers: source tokens (rows x longest row) in a batch of a process."""
    batch_rows: Annotated[Count, _ENGINE] = 32
    """engine: rows in a batch of a process. The next row enters when one has ended."""
    shard_rows: PositiveInt = 2048
    """Input rows per shard; shards are written, resumed and distributed to processes as a whole."""
    max_source_tokens: Count = 512
    """Inputs longer than this are skipped and reported by row number."""

    @property
    def decoded_by(self) -> str:
        """The backend, with `auto` resolved to server or transformers."""
        own = "server" if self.server.url else "transformers"
        return own if self.backend == "auto" else self.backend

    @property
    def measures_backend(self) -> bool:
        """Whether `auto` may choose between engine and transformers, as their outputs are equal."""
        free = self.backend == "auto" and "batch_tokens" not in self.model_fields_set
        return free and self.method != "beam" and self.decoded_by == "transformers"


class BigramsConfig(Config):
    """`drafttrain bigrams`: the most frequent next token of each token, for Max-Gram."""

    distilled: LocalPath
    """Folder made by `drafttrain distill`."""
    out: LocalPath
    """The table, a .safetensors file."""


class OnTarget(Config):
    """Settings shared by `eval`, `generate` and `tune`."""

    target: TargetConfig | None = None
    """Default: the target of the heads' or the drafter's training, else of the newest run."""
    data: DataConfig | None = None
    """Inputs; `tune` chooses on them. Default: the run's held-out rows; for `generate`, standard
    input."""
    compile: Compile = "auto"
    """torch.compile for target and drafter, up to a minute per new shape. auto: on a GPU only."""


class MeasuringConfig(OnTarget):
    """Settings shared by `eval` and `tune`."""

    batch_sizes: BatchSizes = (1,)
    """Batch sizes to measure, such as 4,8,16; 1 is always included. `tune` chooses for each."""
    report: LocalPath | None = None
    """Report (JSON), with plot, page and samples next to it. If it has more inputs or methods,
    `eval` keeps it and writes NAME.smaller.json. Default: report.json or tune.json in the run's
    folder, else in the current one."""


class DecodingConfig(OnTarget):
    """The method of `eval` and `generate`."""

    decode: DecodeConfig = DecodeConfig()
    policy: LocalPath | None = None
    """A policy.json of `drafttrain tune`, used if no stop policy, tree or cascade is given.
    Default: the one in the drafter's folder."""


class EvalConfig(DecodingConfig, MeasuringConfig):
    """`drafttrain eval`: acceptance and speed of a drafter on a target and inputs."""

    mode: Literal["decode", "teacher-forced"] = "decode"
    """decode: measure by decoding with each method. teacher-forced: the target decodes once, and
    the acceptance of each method is computed in parallel passes over its outputs."""
    others: dict[str, DecodeConfig] = {}
    """Additional methods by name, with the sampling settings of `decode` and, unless they have
    their own, its drafter: {tree: {tree: {kind: opt-tree}}, copied: {drafter: max-gram}}."""
    sweep: dict[Swept, Annotated[list[float], Field(min_length=1), Listed]] = {}
    """Values to measure, such as k=5,10 or {k: [5, 10], h: [0.5, 0.7], beta: [3]}. Each value of a
    stop setting is one stop policy; beta and tau add Spec-Verification with each pair."""
    rank_data: DataConfig | None = None
    """Prompts on which acceptance by rank is measured for sequoia; they must differ from `data`."""
    baselines: Annotated[tuple[Baseline, ...], Listed, _TIMED] = ("generate", "beam")
    """Baselines of Transformers: `generate`, beam search with 5 beams, assisted generation with
    those drafters that are language models (batch size 1 only)."""
    repeats: Annotated[Count, _TIMED] = 3
    """Interleaved timing rounds; medians are reported."""
    warmup: Annotated[CountOrZero, _TIMED] = 3
    """Inputs decoded by every method before timing starts."""
    bleu_tokenizer: Annotated[str, _TIMED] = "13a"
    """sacrebleu's tokenizer: 13a, or zh, ja-mecab, ko-mecab, char for such outputs."""


class GenerateConfig(DecodingConfig):
    """`drafttrain generate`: decode texts, with or without a drafter."""

    batch_size: Count = 1
    """Maximal number of inputs decoded at once; outputs keep the order of the inputs."""


class CacheConfig(Config):
    """`drafttrain cache`: the drafter's hidden states at draft tokens, labelled with how likely the
    target accepts each, for training acceptance heads."""

    target: TargetConfig
    drafter: Location
    """Folder or Hub name of the drafter."""
    distilled: LocalPath
    """Folder of the target's outputs, made by `drafttrain distill`."""
    out: LocalPath
    """Folder for the shards and manifest.json."""
    state: Literal["drawn", "token"] = "drawn"
    """drawn: the hidden state from which a token is drawn. token: the state at the token's own
    position, one drafter pass later (SpecDec++)."""
    mixing: Annotated[float, Field(ge=0.0, lt=1.0), CountsFor("state=token")] = 0.15
    """Token mixing r: share of positions that keep the target's token (SpecDec++, Section 3.3)."""
    mixes: Count = 1
    """Number of independent draws of draft tokens and mixing; epochs cycle through them."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the stored hidden states; float16 takes half the disk."""
    seed: Seed = 0
    """Seed of every random choice."""
    batch_tokens: Count = 4096
    """Tokens (rows x longest row) in a forward pass."""
    shard_rows: PositiveInt = 512
    """Distilled rows per shard."""

    @property
    def token_mixing(self) -> float | None:
        """The mixing r of `token` states; None for `drawn` states, which have none."""
        return self.mixing if self.state == "token" else None


class TuneConfig(MeasuringConfig):
    """`drafttrain tune`: decodes your prompts with every candidate, interleaved, and chooses the
    fastest one for each batch size."""

    drafter: Location | None = None
    """Folder or Hub name of the drafter. Default: that of the heads' run."""
    heads: LocalPath | None = None
    """Folder of a head, or a run of heads. Default: the newest run; none if a drafter is given."""
    report_data: DataConfig | None = None
    """Prompts for the final figures. Default: a third of `data`, then not used for the choice."""
    sampling: SamplingConfig | None = None
    """Default: the sampling of the heads' labels; greedy decoding without heads."""
    sweep: dict[Tuned, Annotated[list[float], Listed]] = {}
    """Values to try, such as k=2,4 or {h: [0.5], entropy: []}. Default: draft lengths k for the
    drafter's kind and training; three thresholds h for heads and that of SpecDec++'s Theorem 3.1;
    two or three values of each other stop policy; trees of 8, 16 and 30 nodes."""
    trees: Annotated[tuple[TreeName, ...], Listed] = ("opt-tree", "rsd-s")
    """Kinds of draft trees to try; [] for none. Drawn trees are tried only with sampling."""
    candidates: dict[str, DecodeConfig] = {}
    """Additional candidates by name, at most 40 in all: {deep: {cascade: {drafters: [small,
    max-gram], increments: "5,3,0/4,10/10", leniency: 2}}}."""
    minutes: PositiveFloat = 5.0
    """Time in minutes. With less time the choice is based on fewer prompts, but on 4 at least."""
    write: bool = False
    """Write policy.json to the folder of the heads or the drafter, where generate, eval and export
    find it; else tune.policy.json next to the report, for their setting `policy`."""


class ExportConfig(Config):
    """`drafttrain export`: a drafter, its head and its policy as one folder for other programs."""

    drafter: Location
    """Folder or Hub name of the drafter, or the run that trained it (RUN means RUN/final)."""
    head: LocalPath | None = None
    """Folder of an acceptance head, or a run of heads, whose policy.json names one."""
    policy: LocalPath | None = None
    """The policy.json. Default: the one next to the head or in the drafter's folder, if any."""
    verifier: VerifierConfig | None = None
    """The verifier in policy.json. Default: the policy's, else auto (lossless)."""
    target: TargetConfig | None = None
    """The target. Default: the one recorded in the config.json of the head or the drafter."""
    license: str | None = None
    """Licence of the drafter, as the Hub names it (apache-2.0, cc-by-4.0, other)."""
    training_data: str | None = None
    """Training data of the drafter: a Hub name or a description. Default: that of its run."""
    report: LocalPath | None = None
    """Report of `eval` or `tune` for the model card. Default: that of the drafter's run."""
    out: LocalPath
    """The folder to write."""
    engines: Annotated[tuple[EngineName, ...], Listed] = ()
    """Programs that will use the export, such as vllm,llama.cpp: their requirements are checked and
    their commands printed. Default: none; the model card has the commands of all programs."""
    num_assistant_tokens: Few | None = None
    """Draft length of other programs. Default: the policy's, else the run's k, else 4."""
    check: Literal["auto", "target", "drafter"] = "auto"
    """How the export is checked on 20 held-out inputs of the run, else random ones. target: compare
    custom_generate with plain `generate`. drafter: compare drafts only. auto: target, if it is a
    local folder."""
    force: bool = False
    """Replace an earlier export."""
    hub: str | None = None
    """Name on the Hub (USER/NAME) of the later upload, which the model card and commands use."""
