"""Load targets, tokenizers and drafters, with errors that say what to change.

Weights are read from safetensors only; Python code beside the weights runs only where the user
asked for it (`target.trust_remote_code`).
"""

from __future__ import annotations

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
    check_weight_files,
    first_line,
    other_weights,
    read_weights,
)

HUB_SECONDS = 5.0
"""How long the Hub may take to say whether it has a model."""
TOKENIZER_FILES = ("token*", "vocab*", "merges*", "*.model", "*.spm")
"""What a folder with a tokenizer of any kind has at least one of."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to decode: weights on their device, in eval mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str
    """Where it was loaded from, as the user gave it."""
    processor: ProcessorMixin | None = None
    """What makes the model's inputs of audio; None where they are token ids."""


def load_target(config: TargetConfig) -> LoadedTarget:
    """Load an encoder-decoder or decoder-only target and its tokenizer.

    Raises ConfigError, before any weights are read, for a missing folder, a model that is no
    language model, a missing tokenizer, or a device that is not there.
    """
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
    """A target whose weights are somewhere else: its settings and tokenizer, no numbers.

    Raises ConfigError as `load_target`.
    """
    model_config = check_target(config)
    tokenizer = load_tokenizer(config)
    with torch.device("meta"):
        model = auto_class(model_config).from_config(
            model_config, trust_remote_code=config.trust_remote_code
        )
    model.generation_config = generation_settings(config, model_config)
    return LoadedTarget(model.eval(), tokenizer, config.path)


def cache_for_generate(model: PreTrainedModel) -> dict[str, EncoderDecoderCache]:
    """What `generate` has to be given to decode with this model: mostly nothing.

    Transformers makes a T5's cache as deep as its encoder and fails at the first step of a deeper
    decoder (`num_decoder_layers`); here it is as deep as the decoder.
    """
    layers = getattr(model.config, "num_decoder_layers", None)
    if layers is None or layers == model.config.num_hidden_layers:
        return {}
    depth = model.get_decoder().config
    own, cross = DynamicCache(config=depth), DynamicCache(config=depth)
    return {"past_key_values": EncoderDecoderCache(own, cross)}


def cache_is_deep_enough(config: PretrainedConfig) -> bool:
    """Whether `generate` alone makes a cache that this model's decoder can use; see above."""
    layers = getattr(config, "num_decoder_layers", None)
    return layers is None or layers <= config.num_hidden_layers


def report_generate_defaults(target: LoadedTarget, temperature: float, beams: int = 1) -> None:
    """A line where the target's own `generate` would by default use more beams, or sample otherwise
    than at this temperature; each is said once."""
    settings = target.model.generation_config
    drawn, own = 1.0 if settings.temperature is None else settings.temperature, []
    if (settings.num_beams or 1) > beams:
        own.append(f"with {settings.num_beams} beams")
    if (settings.num_return_sequences or 1) > 1:
        own.append(f"{settings.num_return_sequences} outputs of an input")
    if settings.do_sample and drawn != temperature:
        own.append(f"by sampling at temperature {drawn:g}")
    if own:
        how = f"samples at temperature {temperature:g}" if temperature else "decodes greedily"
        _say_once(
            f"target.path = {target.path!r}: by default its `generate` decodes "
            f"{' and '.join(own)}; drafttrain {how}, with {beams} beam{'s' * (beams > 1)}, and "
            "gives other outputs than that"
        )


@cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr)


def auto_class(
    config: PretrainedConfig,
) -> type[AutoModelForCausalLM | AutoModelForSeq2SeqLM | AutoModelForSpeechSeq2Seq]:
    """What loads a language model of this configuration."""
    if takes_audio(config):
        return AutoModelForSpeechSeq2Seq
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def check_target(config: TargetConfig) -> PretrainedConfig:
    """Refuse what is no encoder-decoder or decoder-only language model, from config.json alone.

    Weights that are not safetensors are refused too, by the names of their files. Returns the
    model's configuration. Raises ConfigError.
    """
    name = f"target.path = {config.path!r}"
    model_config = read_config(
        config.path, name, config.revision, config.trust_remote_code, "target.trust_remote_code"
    )
    if not (is_language_model(model_config) or config.trust_remote_code):
        raise ConfigError(
            f"target.path = {config.path!r} is a {model_config.model_type!r} model, not a language "
            "model that generates; give an encoder-decoder (T5, BART, Marian, ...) or decoder-only "
            "one (Llama, Qwen, GPT-2, ...), or a Whisper"
        )
    check_speech(config, model_config)
    check_weight_files(config.path, name, config.revision)
    return model_config


def is_language_model(config: PretrainedConfig) -> bool:
    """Whether Transformers has a generating language model for this configuration."""
    if config.is_encoder_decoder:
        return type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING or takes_audio(config)
    if type(config) in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING:  # a decoder that lacks its encoder
        return False
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def read_config(
    path: str,
    name: str,
    revision: str | None = None,
    trusted: bool = False,
    switch: str | None = None,
) -> PretrainedConfig:
    """A model's config.json, of a folder or a name on the Hub. Raises ConfigError.

    `name` is what messages call the model; `switch` the setting that would allow to run the code
    that some models bring along. Without it such models are refused, and nobody is asked.
    """
    folder = Path(path).expanduser()
    _check_exists(path, name, revision)
    if folder.is_dir():
        _check_folder(folder, name)
        if revision is not None:
            raise ConfigError(
                f"{name} is a folder here, which has no revision {revision!r}; leave that out"
            )
    try:
        settings, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        own_code = "auto_map" in settings and settings.get("model_type") not in CONFIG_MAPPING
        if own_code and not trusted:
            remedy = "give a model that Transformers knows"
            if switch is not None:
                remedy = f"read that code, and give {switch}=true if you trust its author"
            raise ConfigError(
                f"{name} needs Python code of its own (auto_map in its config.json); {remedy}"
            )
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trusted)
    except ConfigError:
        raise
    except Exception as error:  # a config.json may hold anything
        raise ConfigError(
            f"{name}: its config.json describes no model ({first_line(error)}); correct it, or "
            "copy the model again"
        ) from error


def _check_folder(folder: Path, name: str) -> None:
    """A folder that holds something else than a model is refused by what it holds. ConfigError."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        raise ConfigError(
            f"{name} holds an adapter ({adapter.name}), which is no model by itself; merge it into "
            "its base once (merge_and_unload of peft, then save_pretrained), and give that folder"
        )
    if not (folder / "config.json").is_file():
        others = other_weights(folder)
        raise ConfigError(
            f"{name} holds no config.json{f', but {others[0]}' if others else ''}; give the folder "
            "of a Transformers model, as save_pretrained writes it, or the final/ folder of a run"
        )
    if (settings := folder / "generation_config.json").is_file():
        try:  # Transformers would decode without it
            GenerationConfig.from_pretrained(folder)
        except Exception as error:  # it may hold anything
            raise ConfigError(
                f"{name}: {settings.name} cannot be read ({first_line(error)}); correct it, or "
                "copy the model again"
            ) from error


def choose_device(name: str) -> torch.device:
    """The device for `auto`, `cpu`, `cuda` or `cuda:N`. Raises ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"target.device = {name!r} is no device that drafttrain runs on; use auto, cpu, cuda "
            "or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"target.device = {name!r}, but this machine has {torch.cuda.device_count()} usable "
            "CUDA devices; use target.device=auto or cpu"
        )
    return device


def _check_exists(path: str, name: str, revision: str | None = None) -> None:
    """A model that is neither a folder nor on the Hub is refused at once, with the folder whose
    name is nearest. The Hub is asked once, and only for what is not in its cache. ConfigError."""
    folder = Path(path).expanduser()
    if folder.is_dir() and path:
        return
    if folder.is_file():
        raise ConfigError(
            f"{name} is a file; give the folder of a Transformers model (config.json, safetensors "
            "and a tokenizer), or a name on the Hub"
        )
    reason = "no such folder"
    if path and not path.startswith((".", "/", "~")) and path.count("/") <= 1:  # a name, too
        try:
            if isinstance(try_to_load_from_cache(path, "config.json", revision=revision), str):
                return
            url = hf_hub_url(path, "config.json", revision=revision)
            get_hf_file_metadata(url, timeout=HUB_SECONDS)
            return
        except HfHubHTTPError as error:
            reason += f", and the Hub does not have its config.json ({first_line(error)})"
        except Exception as error:  # the connection's libraries have many
            reason += f", and the Hub cannot be asked ({first_line(error)})"
    raise ConfigError(
        f"{name}: {reason}; {near_folder(folder)}give an existing model folder or a name on the Hub"
    )


def near_folder(folder: Path) -> str:
    """`did you mean PATH? `: the folder whose path is most like that of one which is not there."""
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
    """The target's tokenizer, which marks sources with `source_language`. Raises ConfigError where
    there is none, and for languages that it does not know or misses."""
    name = f"target.path = {config.path!r}"
    tokenizer = read_tokenizer(config.path, name, config.revision, config.trust_remote_code)
    model_config = read_config(config.path, name, config.revision, config.trust_remote_code)
    choose_languages(tokenizer, generation_settings(config, model_config), config)
    return tokenizer


def read_tokenizer(
    path: str, name: str, revision: str | None = None, trusted: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder or of a name on the Hub. Raises ConfigError."""
    _check_exists(path, name)
    folder = Path(path)
    if folder.is_dir() and not any(any(folder.glob(names)) for names in TOKENIZER_FILES):
        raise ConfigError(
            f"{name}: there is no tokenizer in it; put the tokenizer's files beside the weights"
        )
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trusted)
    except Exception as error:  # its files may hold anything
        raise ConfigError(
            f"{name}: its tokenizer cannot be loaded ({first_line(error)}); put the tokenizer's "
            "whole files beside the weights"
        ) from error


def load_processor(config: TargetConfig, model_config: PretrainedConfig) -> ProcessorMixin | None:
    """The target's processor, where its inputs are audio. Raises ConfigError without one."""
    if not takes_audio(model_config):
        return None
    try:
        processor = AutoProcessor.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        if not isinstance(processor, ProcessorMixin):  # a tokenizer, where it finds nothing else
            raise ValueError(f"there is a {type(processor).__name__} only")
    except Exception as error:  # its files may hold anything
        raise ConfigError(
            f"target.path = {config.path!r}: its processor, which makes features of audio, cannot "
            f"be loaded ({first_line(error)}); put the processor's files beside the weights"
        ) from error
    return processor
