"""Settings of serving programs: distilling from them, making files for them, measuring them."""

from __future__ import annotations

from pathlib import Path
from shlex import split
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from drafttrain.config.base import Config, split_at_commas
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.inputs import DataConfig, TargetConfig


def _words(value: object) -> object:
    """`-t 4 -fa on` as a list of words."""
    return split(value) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Quantisation = Literal[
    "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"
]


class ServerConfig(Config):
    """Servers that run the target of a distillation, by OpenAI's interface."""

    urls: tuple[str, ...] = ()
    """Their addresses, as http://localhost:8000/v1, several with commas between them; rows are
    shared out among them. A key is read from the environment (DRAFTTRAIN_API_KEY or
    OPENAI_API_KEY) and stands nowhere else."""
    model: str | None = None
    """The name that they have for the target. Default: the only one, or the target's path."""
    concurrency: PositiveInt = 32
    """Rows that each server is asked for at once."""
    timeout: PositiveFloat = 600.0
    """Seconds that an answer may take."""
    retries: NonNegativeInt = 6
    """How often a row is asked for again, where a server fails."""
    backoff: PositiveFloat = 1.0
    """Seconds before the first of these times, twice as many before each next one, a minute at
    most; what a server asks for (Retry-After) goes before."""
    prompts: Literal["tokens", "text"] = "tokens"
    """How prompts are sent. text: for servers that take no token ids (transformers serve)."""

    _split = field_validator("urls", mode="before")(split_at_commas)


class GgufConfig(Config):
    """Files for llama.cpp, made by its own tools."""

    converter: Path | None = None
    """llama.cpp's convert_hf_to_gguf.py."""
    python: Path | None = None
    """The Python that runs it; it needs torch, transformers and sentencepiece. Default: this
    one."""
    quantizer: Path | None = None
    """llama.cpp's llama-quantize, for `quantise`."""
    outtype: Literal["f16", "bf16", "f32"] = "f16"
    """Numbers of the first file."""
    quantise: tuple[Quantisation, ...] = ()
    """One more file for each of these, as q8_0,q4_0: a cheaper drafter accepts less, outputs stay
    the target's."""

    _split = field_validator("quantise", mode="before")(split_at_commas)


class LlamaServerConfig(Config):
    """llama.cpp's llama-server, started twice on this machine: without the drafter, and with it."""

    program: Path | None = None
    """llama-server; it listens on loopback only, on free ports, and is ended with the command."""
    model: Path | None = None
    """The target as a GGUF file, made by llama.cpp's converter."""
    draft_model: Path | None = None
    """The drafter as one; `drafttrain export --for llama.cpp` makes it."""
    n_max: PositiveInt = 3
    """--spec-draft-n-max: most tokens drafted in a round."""
    p_min: float = Field(default=0.0, ge=0.0, lt=1.0)
    """--spec-draft-p-min: a draft ends before a token of less probability."""
    context: PositiveInt = 4096
    """Tokens that each of the sequences may have, prompt included."""
    arguments: Words = ()
    """More options for both, as "-t 4 -ctk f32 -ctv f32"."""
    draft_arguments: Words = ()
    """More options for the one with the drafter, as "--spec-synth-rates 0.7,0.5,0.3"."""
    start_seconds: PositiveFloat = 300.0
    """Seconds that loading may take."""


class MeasuredServersConfig(Config):
    """Servers that run already."""

    urls: tuple[str, ...] = Field(default=(), max_length=2)
    """The address of one, or of two: without the drafter, with it. A key is read from the
    environment (DRAFTTRAIN_API_KEY or OPENAI_API_KEY)."""
    model: str | None = None
    """The name that they have for the target. Default: the only one, or the target's path."""
    timeout: PositiveFloat = 600.0
    """Seconds that an answer may take."""

    _split = field_validator("urls", mode="before")(split_at_commas)


class BenchConfig(Config):
    """`drafttrain bench`: what a drafter is worth in a server, measured there."""

    target: TargetConfig
    """Of it only the tokenizer is read: prompts are sent as token ids."""
    data: DataConfig
    """Prompts; none is asked twice, so every concurrency gets its share of them."""
    server: MeasuredServersConfig = MeasuredServersConfig()
    """Servers that run already."""
    llama: LlamaServerConfig = LlamaServerConfig()
    """llama-server, started here."""
    concurrency: tuple[PositiveInt, ...] = Field(default=(1, 2, 4), min_length=1)
    """Prompts that are asked at once, each of these in turn."""
    sampling: SamplingConfig = SamplingConfig()
    """How the servers decode. Seeds differ by row, and are the same on both sides."""
    warmup: NonNegativeInt = 2
    """Prompts that both are asked first, and that do not count."""
    bootstrap: PositiveInt = 1000
    """Resamples of the prompts for the 95 % intervals."""
    report: Path | None = None
    """A teacher-forced report of `drafttrain eval`, whose prediction is shown beside."""
    out: Path = Path("bench.json")
    """Where the report goes."""

    _split = field_validator("concurrency", mode="before")(split_at_commas)
