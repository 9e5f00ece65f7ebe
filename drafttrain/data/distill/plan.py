"""Checks of a distillation's settings and estimates of its size, without the target's weights."""

from math import ceil
from pkgutil import resolve_name
from typing import NamedTuple

import datasets

from drafttrain.config.base import ConfigError, counted
from drafttrain.config.commands import DistillConfig
from drafttrain.data.inputs.chats import Refused
from drafttrain.data.inputs.clips import AUDIO, SECONDS, check_unread
from drafttrain.data.inputs.prompts import load_prompts
from drafttrain.data.inputs.tokens import describe_prompts, tokenize_prompts
from drafttrain.data.shards.outputs import Manifest
from drafttrain.data.shards.store import MANIFEST, check_folder, check_same_settings
from drafttrain.decoding.engine.architectures import (
    check_configuration,
    position_limit,
    source_limit,
)
from drafttrain.decoding.engine.speech import read_start
from drafttrain.models.languages import generation_settings
from drafttrain.models.loading import check_target, choose_device, load_tokenizer
from drafttrain.models.speech import set_language_and_task, takes_audio

SAMPLE, SPOKEN = 1000, 4.0
"""About how many inputs are tokenised to estimate the tokens of all; tokens per second of speech,
for English read aloud."""


class DistillPlan(NamedTuple):
    """Size of a distillation, estimated from a sample of the inputs."""

    rows: int
    source_tokens: int
    target_tokens: int
    """Estimate: each output as long as its input, at most max_new_tokens; max_new_tokens for
    decoder-only targets; `SPOKEN` per second for clips, at most max_new_tokens."""
    text: str
    """Summary with the source of the inputs, the first input, all sizes, shards and disk use."""


def check_distillation(config: DistillConfig, group: str = "data") -> datasets.Dataset:
    """Checks everything that does not need the target's weights and returns the inputs. group: name
    of the inputs' settings in messages. Raises ConfigError."""
    check_distill_settings(config)
    choose_device(config.target.device)
    model_config = check_target(config.target)
    load_tokenizer(config.target)
    prompt = 0 if model_config.is_encoder_decoder else 1
    if takes_audio(model_config):
        check_unread(config, ("max_source_tokens",))
        settings = generation_settings(config.target, model_config)
        set_language_and_task(settings, config.target)
        prompt = len(read_start(settings, model_config))
    positions, new = position_limit(model_config), config.sampling.max_new_tokens
    if positions is not None and new > positions - prompt:
        raise ConfigError(
            f"sampling.max_new_tokens = {new}, but the target has only {positions} positions"
            f"{', prompt included' if prompt else ''}; use sampling.max_new_tokens="
            f"{positions - prompt} or less (in a recipe: distill.sampling.max_new_tokens)"
        )
    if (config.out / MANIFEST).is_file():
        there, wanted = Manifest.read(config.out), config
        before, limit = there.settings.data.limit, config.data.limit
        if before is not None and (limit is None or limit > before):  # a limit may grow
            data = config.data.model_copy(update={"limit": before})
            wanted = config.model_copy(update={"data": data})
        check_same_settings(config.out, there, there.model_copy(update={"settings": wanted}))
    return load_prompts(config.data, config.target, group)


def plan_distillation(config: DistillConfig) -> DistillPlan:
    """Estimates rows, tokens and disk use. Loads only the inputs and the tokenizer."""
    inputs, most = check_distillation(config), config.sampling.max_new_tokens
    chosen, lengths = sampled_lengths(config, inputs)
    if audio := AUDIO in inputs.column_names:
        outputs = [min(round(SPOKEN * seconds), most) for seconds in chosen[SECONDS]]
    elif check_target(config.target).is_encoder_decoder:
        outputs = [min(length, most) for length in lengths]
    else:
        outputs = [most] * len(lengths)
    rows, scale = len(inputs), len(inputs) / len(chosen)
    tokens, new_tokens = round(scale * sum(lengths)), round(scale * sum(outputs))
    # two bytes a token after zstd; clips are not copied
    disk = 2 * (new_tokens + (0 if audio else tokens)) + 8 * rows
    described = describe_prompts(load_tokenizer(config.target), inputs)
    text = (
        f"{config.data.path}: {described}\n{rows:,} rows, about {tokens:,} source tokens and "
        f"{new_tokens:,} generated ones, in {counted(ceil(rows / config.shard_rows), 'shard')}, "
        f"about {disk / 2**20:,.1f} MiB on disk"
    )
    return DistillPlan(rows, tokens, new_tokens, text)


def sampled_lengths(
    config: DistillConfig, inputs: datasets.Dataset
) -> tuple[datasets.Dataset, list[int]]:
    """Returns evenly spaced inputs and the number of source tokens of each; 0 if refused."""
    chosen = inputs.select(range(0, len(inputs), max(1, len(inputs) // SAMPLE)))
    model_config = check_target(config.target)
    if AUDIO in inputs.column_names:
        return chosen, [source_limit(model_config) or 0] * len(chosen)
    decoder_only = not model_config.is_encoder_decoder
    found = tokenize_prompts(load_tokenizer(config.target), chosen, decoder_only)
    return chosen, [0 if isinstance(ids, Refused) else len(ids) for ids in found]


def check_distill_settings(config: DistillConfig) -> None:
    """Raises ConfigError if settings contradict each other or the backend does not support them;
    reads no weights."""
    backend = config.decoded_by
    check_folder(config.out)
    if config.method == "beam" and backend != "transformers":
        raise ConfigError(
            f"method = 'beam', but backend {backend!r} decodes by greedy or sample only; use "
            "backend=transformers, or method=greedy"
        )
    if config.method == "sample" and config.sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0.0 with method = 'sample' would be greedy decoding; "
            "use sampling.temperature=1.0, or method=greedy"
        )
    if backend == "engine":
        check_configuration(check_target(config.target))
    if backend == "server":
        resolve_name("drafttrain.data.distill.server:check_server")(config)
