"""Loads targets, tokenizers and processors, with errors that say what to change.

Weights are read from safetensors only. Python code in a model's folder runs only if the user allows
it (`target.trust_remote_code`).
"""

import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    AutoTokenizer,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.configuration_utils import PretrainedConfig

from drafttrain.config.base import ConfigError
from drafttrain.config.inputs import TargetConfig
from drafttrain.models.languages import choose_languages, generation_settings
from drafttrain.models.speech import check_speech, set_language_and_task, takes_audio
from drafttrain.models.weight_files import (
    check_own_file,
    check_weight_files,
    first_line,
    named_errors,
    other_weights,
    read_weights,
)

HUB_SECONDS = 5.0
"""Timeout of the check whether the Hub has a model."""
TOKENIZER_FILES = ("token*", "vocab*", "merges*", "*.model", "*.spm")
"""Patterns of file names; a folder with a tokenizer matches at least one."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to decode: weights on their device, in eval mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str
    """Folder or Hub name, as the user gave it."""
    processor: ProcessorMixin | None = None
    """Converts audio to model inputs; None if the inputs are token ids."""


def load_target(config: TargetConfig) -> LoadedTarget:
    """Loads an encoder-decoder or decoder-only target and its tokenizer. Raises ConfigError, before
    reading weights for everything but these."""
    device = choose_device(config.device)
    model_config = check_target(config)
    tokenizer, processor = load_tokenizer(config), load_processor(config, model_config)
    model = read_weights(
        auto_class(model_config),
        config.path,
        f"target.path = {config.path!r}",
        revision=config.revision,
        dtype=getattr(torch, config.dtype),
        trust_remote_code=config.trust_remote_code,
    )
    if processor is not None:
        set_language_and_task(model.generation_config, config)
    choose_languages(tokenizer, model.generation_config, config)
    return LoadedTarget(model.to(device).eval(), tokenizer, config.path, processor)


def outline_target(config: TargetConfig) -> LoadedTarget:
    """Loads a target's settings and tokenizer without weights. Raises ConfigError."""
    model_config = check_target(config)
    tokenizer = load_tokenizer(config)
    loads, trusted = auto_class(model_config), config.trust_remote_code
    with torch.device("meta"):
        model = loads.from_config(model_config, trust_remote_code=trusted)
    model.generation_config = generation_settings(config, model_config)
    return LoadedTarget(model.eval(), tokenizer, config.path)


def cache_for_generate(model: PreTrainedModel) -> dict[str, EncoderDecoderCache]:
    """Returns the cache argument that `generate` needs for this model; usually nothing.

    Transformers makes a T5 cache with as many layers as the encoder and fails at the first step if
    the decoder has more (`num_decoder_layers`). This cache has as many layers as the decoder.
    """
    if cache_is_deep_enough(model.config):
        return {}
    caches = (DynamicCache(config=model.get_decoder().config) for _ in range(2))
    return {"past_key_values": EncoderDecoderCache(*caches)}


def cache_is_deep_enough(config: PretrainedConfig) -> bool:
    """Whether `generate` works without `cache_for_generate`."""
    layers = getattr(config, "num_decoder_layers", None)
    return layers is None or layers <= config.num_hidden_layers


def report_generate_defaults(target: LoadedTarget, temperature: float, beams: int = 1) -> None:
    """Prints once if the target's `generate` by default uses more beams or another temperature."""
    settings = target.model.generation_config
    drawn, defaults = 1.0 if settings.temperature is None else settings.temperature, []
    if (settings.num_beams or 1) > beams:
        defaults.append(f"with {settings.num_beams} beams")
    if (settings.num_return_sequences or 1) > 1:
        defaults.append(f"{settings.num_return_sequences} outputs per input")
    if settings.do_sample and drawn != temperature:
        defaults.append(f"by sampling at temperature {drawn:g}")
    if defaults:
        how = f"samples at temperature {temperature:g}" if temperature else "decodes greedily"
        _print_once(
            f"target.path = {target.path!r}: by default its `generate` decodes "
            f"{' and '.join(defaults)}; drafttrain {how}, with {beams} beam{'s' * (beams > 1)}, "
            "so outputs will differ"
        )


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr)


def auto_class(
    config: PretrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForSeq2SeqLM | AutoModelForSpeechSeq2Seq]:
    """Returns the Auto class that loads a language model of this configuration."""
    if takes_audio(config):
        return AutoModelForSpeechSeq2Seq
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def check_target(config: TargetConfig) -> PretrainedConfig:
    """Returns a target's configuration after checking that it is a language model in safetensors.

    Reads only config.json and the names and headers of weight files. Raises ConfigError.
    """
    name = f"target.path = {config.path!r}"
    model_config = read_config(config.path, name, config.revision, config.trust_remote_code)
    if not (is_language_model(model_config) or config.trust_remote_code):
        raise ConfigError(
            f"{name} is a {model_config.model_type!r} model, not a language model that generates; "
            "give an encoder-decoder (T5, BART, ...), a decoder-only one (Llama, ...) or a Whisper"
        )
    check_speech(config, model_config)
    check_weight_files(config.path, name, config.revision)
    return model_config


def is_language_model(config: PretrainedConfig) -> bool:
    """Whether Transformers has a generating language model for this configuration."""
    if config.is_encoder_decoder:
        return type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING or takes_audio(config)
    if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:  # a decoder without its encoder
        return False
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def read_config(
    path: str, name: str, revision: str | None = None, trusted: bool | None = None
) -> PretrainedConfig:
    """Reads a model's config.json from a folder or the Hub. Raises ConfigError.

    `name`: the model's name in messages. `trusted`: target.trust_remote_code, which allows Python
    code that the model brings along; None: not a target, such code is always refused.
    """
    folder = Path(path)
    _check_exists(path, name, revision)
    if folder.is_dir():
        _check_folder(folder, name)
        if revision is not None:
            raise ConfigError(
                f"{name} is a local folder, which has no revision {revision!r}; leave that out"
            )
    what = f"{name}: its config.json does not describe a model"
    with named_errors(what, "correct it, or copy the model again"):
        settings, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        own_code = "auto_map" in settings and settings.get("model_type") not in CONFIG_MAPPING
        if own_code and not trusted:
            remedy = "give a model that Transformers knows"
            if trusted is not None:
                switch = "target.trust_remote_code=true"
                remedy = f"read that code, and give {switch} if you trust its author"
            raise ConfigError(
                f"{name} needs its own Python code (auto_map in its config.json); {remedy}"
            )
        if (file := settings.get("transformers_weights")) is not None:  # read without other checks
            check_own_file(file, name, "transformers_weights in its config.json")
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=bool(trusted))


def _check_folder(folder: Path, name: str) -> None:
    """Checks that a folder holds a model and not something else. Raises ConfigError."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        raise ConfigError(
            f"{name} holds an adapter ({adapter.name}), not a complete model; merge it into its "
            "base once (merge_and_unload of peft, then save_pretrained), and give that folder"
        )
    if not (folder / "config.json").is_file():
        others = other_weights(folder)
        raise ConfigError(
            f"{name} holds no config.json{f', but {others[0]}' if others else ''}; give the folder "
            "of a Transformers model, as save_pretrained writes it, or the final/ folder of a run"
        )
    if (folder / "generation_config.json").is_file():  # Transformers ignores a broken one
        what = f"{name}: generation_config.json cannot be read"
        with named_errors(what, "correct it, or copy the model again"):
            GenerationConfig.from_pretrained(folder)


def choose_device(name: str) -> torch.device:
    """Returns the device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError if missing."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"(cpu|cuda)(:(0|[1-9]\d?))?", name):
        raise ConfigError(
            f"target.device = {name!r} is not a device for targets; use auto, cpu, cuda or cuda:N"
        )
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"target.device = {name!r}, but this machine has {torch.cuda.device_count()} usable "
            "CUDA devices; use target.device=auto or cpu"
        )
    return device


def _check_exists(path: str, name: str, revision: str | None = None) -> None:
    """Raises ConfigError for a model that is neither a folder nor on the Hub, which is queried once
    for models that are not in its cache."""
    folder = Path(path)
    if folder.is_dir() and path:
        return
    if folder.is_file():
        raise ConfigError(
            f"{name} is a file; give the folder of a Transformers model (config.json, safetensors "
            "and a tokenizer), or a name on the Hub"
        )
    reason = "no such folder"
    if path and not path.startswith((".", "/", "~")) and path.count("/") <= 1:  # may be a Hub name
        try:
            if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
                return
            url = hf_hub_url(path, "config.json", revision=revision)
            get_hf_file_metadata(url, timeout=HUB_SECONDS)
            return
        except HfHubHTTPError as error:
            reason += f", and the Hub does not have its config.json ({first_line(error)})"
        except Exception as error:  # connection errors come from several libraries
            reason += f", and the Hub cannot be reached ({first_line(error)})"
    raise ConfigError(
        f"{name}: {reason}; {near_folder(folder)}give an existing model folder or a name on the Hub"
    )


def near_folder(folder: Path) -> str:
    """Returns `did you mean PATH? ` with the folder most similar to a missing one, or ``."""
    here = Path(folder.anchor)
    for part in folder.relative_to(here).parts:
        if not (here / part).is_dir():
            inside = [one.name for one in here.iterdir() if one.is_dir()]
            part = next(iter(get_close_matches(part, inside, n=1)), None)
            if part is None:
                return ""
        here /= part
    return f"did you mean {str(here)!r}? " if folder.parts else ""


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """Loads the target's tokenizer, set to mark sources with `source_language`. Raises
    ConfigError."""
    given = config.path, f"target.path = {config.path!r}", config.revision, config.trust_remote_code
    tokenizer, model_config = read_tokenizer(*given), read_config(*given)
    choose_languages(tokenizer, generation_settings(config, model_config), config)
    return tokenizer


def read_tokenizer(
    path: str, name: str, revision: str | None = None, trusted: bool = False
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a model's folder or the Hub. Raises ConfigError."""
    _check_exists(path, name)
    folder = Path(path)
    if folder.is_dir() and not any(any(folder.glob(names)) for names in TOKENIZER_FILES):
        raise ConfigError(
            f"{name}: there is no tokenizer in it; put the tokenizer's files in its folder"
        )
    remedy = "put the complete tokenizer files in its folder"
    with named_errors(f"{name}: its tokenizer cannot be loaded", remedy):
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trusted)


def load_processor(config: TargetConfig, model_config: PretrainedConfig) -> ProcessorMixin | None:
    """Loads the processor of a target with audio inputs, None for others. Raises ConfigError."""
    if not takes_audio(model_config):
        return None
    name = f"target.path = {config.path!r}: its processor, which converts audio to features,"
    with named_errors(f"{name} cannot be loaded", "put the processor's files in its folder"):
        processor = AutoProcessor.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        if not isinstance(processor, ProcessorMixin):  # AutoProcessor may return a tokenizer
            raise ValueError(f"there is only a {type(processor).__name__}")
    return processor
