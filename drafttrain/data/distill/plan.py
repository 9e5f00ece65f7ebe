"""What a distillation will take, and what forbids it, before any weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name

import datasets

from drafttrain.config.backends import BACKENDS
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import DistillConfig
from drafttrain.data.encoded import encoded_bytes
from drafttrain.data.inputs.clips import AUDIO, SECONDS
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.tokens import check_chats, tokenize_prompts
from drafttrain.data.shards.outputs import read_manifest
from drafttrain.data.shards.store import (
    MANIFEST,
    check_folder,
    count_shards,
    read_share,
)
from drafttrain.decoding.engine.architectures import position_limit, source_limit
from drafttrain.models.loading import LoadedTarget, check_target, choose_device, load_tokenizer
from drafttrain.models.speech import hears

SPOKEN = 4.0
"""Tokens that a second of speech has, about: English, read aloud."""
SAMPLE = 1000
"""Inputs that are tokenised to estimate the tokens of all."""


@dataclass(frozen=True)
class DistillPlan:
    """What a distillation will take, estimated from a sample of the inputs."""

    rows: int
    source_tokens: int
    target_tokens: int
    """Outputs as long as their inputs, at most max_new_tokens; of decoder-only targets
    max_new_tokens each."""
    disk_bytes: int
    shards: int

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, about {self.source_tokens:,} source tokens and "
            f"{self.target_tokens:,} generated ones, in {self.shards} shards, "
            f"about {self.disk_bytes / 2**20:,.1f} MiB on disk"
        )


def check_distillation(
    config: DistillConfig, group: str = "data", target: LoadedTarget | None = None
) -> datasets.Dataset:
    """The inputs, once all is checked that can be without the target's weights.

    group: the user's name for the inputs' settings. target: where it is loaded already. Raises
    ConfigError.
    """
    check_distill_settings(config)
    if target is None:
        choose_device(config.target.device)
        model_config, tokenizer = check_target(config.target), load_tokenizer(config.target)
    else:
        model_config, tokenizer = target.model.config, target.tokenizer
    positions, new = position_limit(model_config), config.sampling.max_new_tokens
    prompt = 0 if model_config.is_encoder_decoder else 1
    if positions is not None and new > positions - prompt:
        raise ConfigError(
            f"sampling.max_new_tokens = {new}, but the target has only {positions} positions"
            f"{', prompt included' * prompt}; use sampling.max_new_tokens={positions - prompt} or "
            "less"
        )
    if (config.out / MANIFEST).is_file():
        read_manifest(config.out)
    inputs = load_inputs(config.data, group, hears(model_config))
    check_chats(tokenizer, inputs, not model_config.is_encoder_decoder)
    return inputs


def plan_distillation(config: DistillConfig) -> DistillPlan:
    """Rows, tokens and disk of a run. Loads the inputs and the tokenizer only."""
    inputs = check_distillation(config)
    model_config, most = check_target(config.target), config.sampling.max_new_tokens
    decoder_only, heard = not model_config.is_encoder_decoder, AUDIO in inputs.column_names
    chosen = inputs.select(range(0, len(inputs), max(1, len(inputs) // SAMPLE)))
    if heard:
        lengths = [source_limit(model_config) or 0] * len(chosen)
        outputs = [min(round(SPOKEN * seconds), most) for seconds in chosen[SECONDS]]
    else:
        tokenizer = load_tokenizer(config.target)
        lengths = [len(ids) for ids in tokenize_prompts(tokenizer, chosen, decoder_only)]
        outputs = [most if decoder_only else min(length, most) for length in lengths]
    rows, scale = len(inputs), len(inputs) / len(chosen)
    tokens, new_tokens = round(scale * sum(lengths)), round(scale * sum(outputs))
    # two bytes a token after zstd; clips are not copied, but their encoder states may be kept
    disk = 2 * (new_tokens + (0 if heard else tokens)) + 8 * rows
    if heard and config.encoded is not None:
        disk += encoded_bytes(rows, model_config)
    return DistillPlan(rows, tokens, new_tokens, disk, count_shards(rows, config.shard_rows))


def check_distill_settings(config: DistillConfig) -> None:
    """Refuse settings that contradict each other, or that the backend cannot follow, before any
    weights are read. Raises ConfigError."""
    backend = config.decoded_by
    read_share(config.share)
    check_folder(config.out)
    if config.method not in backend.methods:
        able = [one.name for one in BACKENDS.values() if config.method in one.methods]
        remedy = "leave the drafter out" if config.backend == "auto" else f"backend={able[0]}"
        raise ConfigError(
            f"method = {config.method!r}, but backend {backend.name!r} decodes by "
            f"{' or '.join(backend.methods)} only; use {remedy}, or method={backend.methods[0]}"
        )
    if config.drafter is not None and not backend.takes_drafter:
        able = [one.name for one in BACKENDS.values() if one.takes_drafter]
        raise ConfigError(
            f"drafter = {config.drafter!r} counts for backend {' or '.join(able)} only, but the "
            f"backend is {backend.name!r}; leave it out, or use backend={able[0]}"
        )
    if config.server.urls and backend.reads_weights:
        raise ConfigError(
            f"server.urls = {', '.join(config.server.urls)!r}, but the backend is "
            f"{backend.name!r}; leave one of them out"
        )
    if config.method == "sample" and config.sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0.0 with method = 'sample' would be greedy decoding; "
            "use sampling.temperature=1.0, or method=greedy"
        )
    if backend.checks is not None:
        resolve_name(backend.checks)(config)
