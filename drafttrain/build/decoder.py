"""The Python interface `drafttrain.load`: a target with a drafter, ready to decode."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.build.method import build_method
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import Pair, drafter_for, load_pair, open_kind
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import Compile, OnTarget
from drafttrain.config.decode import DecodeConfig, SamplingConfig, StopConfig, VerifierConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import named_kind
from drafttrain.config.reading import check_read, validate_settings
from drafttrain.config.runs import run_of
from drafttrain.data.inputs.tokens import tokenize_texts
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.engine import compile_calls, reserve
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.types import Output, Sampling, Source
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.models.drafters import load_checked_drafter
from drafttrain.models.loading import LoadedTarget, load_target
from drafttrain.models.weight_files import check_finite

DEFAULT_K = 5
"""Draft tokens per round for drafters whose config does not set a number."""
Inputs = str | Iterable[str] | Iterable[int] | Iterable[Sequence[int]] | Tensor
Model = str | os.PathLike[str] | PreTrainedModel


@dataclass(frozen=True)
class Generation:
    """The output for one input."""

    tokens: list[int]
    """New tokens, including EOS if it was reached."""
    text: str | None
    """The decoded tokens without special tokens; None without a tokenizer."""
    rounds: int
    """Number of target calls."""
    drafted: int
    """Number of draft tokens that the target scored."""
    accepted: int
    """Number of draft tokens that were accepted."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target call, bonus token included."""
        return len(self.tokens) / max(self.rounds, 1)


class SpeculativeDecoder:
    """A target with a drafter. If `lossless` is true, greedy decoding gives the target's tokens and
    sampling follows its distribution."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self.lossless = decoder.verifier.lossless

    def generate(
        self, inputs: Inputs, max_new_tokens: int = 128, batch_size: int = 1
    ) -> list[Generation]:
        """Decodes texts or token ids, `batch_size` at once; returns one result per input, in order.

        inputs: a text, texts, the ids of one input, or rows of ids without padding. Raises
        ValueError for inputs that the target cannot decode, NotFinite for NaN or infinite logits.
        """
        sources = self._sources(inputs)
        if isinstance(max_new_tokens, int):  # else `decode` refuses it
            reserve(max((len(source.prefix) for source in sources), default=0) + max_new_tokens)
        outputs = replace(self.decoder).decode_all(sources, max_new_tokens, batch_size)
        return [self._generation(output) for output in outputs]

    def stream(self, text: str | Sequence[int], max_new_tokens: int = 128) -> Iterator[list[int]]:
        """Yields the tokens of one input as each round commits them. Raises as `generate` does."""
        sources = self._sources(text)
        if len(sources) != 1:
            raise ValueError(f"{len(sources)} inputs, but `stream` decodes one; use `generate`")
        for round_ in replace(self.decoder).decode(sources, max_new_tokens, 1):
            yield list(round_.emitted)

    def _sources(self, inputs: Inputs) -> list[Source]:
        model = self.decoder.target.model
        if model.main_input_name != "input_ids":
            raise ValueError(
                f"the target reads {model.main_input_name}, not texts or ids; use `drafttrain eval`"
            )
        rows = _rows_of(inputs)
        if rows and all(isinstance(row, str) for row in rows):
            if self.tokenizer is None:
                raise ValueError("texts need a tokenizer: load(..., tokenizer=...), or give ids")
            rows = tokenize_texts(self.tokenizer, rows, not model.config.is_encoder_decoder)
        size = model.get_input_embeddings().num_embeddings
        for number, row in enumerate(rows):
            of_ids = isinstance(row, Sequence) and not isinstance(row, str | bytes)
            if not of_ids or not all(isinstance(token, int) for token in row):
                raise ValueError(f"input {number} is {row!r}; give texts only, or token ids only")
            if outside := [token for token in row if not 0 <= token < size]:
                raise ValueError(
                    f"input {number} has the token {outside[0]}, but the target has the tokens 0 "
                    f"to {size - 1}; use its own tokenizer, and no padding"
                )
        return [make_source(row, model) for row in rows]

    def _generation(self, output: Output) -> Generation:
        text, rounds = None, output.rounds
        if self.tokenizer is not None:
            text = self.tokenizer.decode(output.tokens, skip_special_tokens=True)
        drafted = sum(len(round_.drafted) for round_ in rounds)
        accepted = sum(len(round_.path) for round_ in rounds)
        return Generation(output.tokens, text, len(rounds), drafted, accepted)


def _rows_of(inputs: Inputs) -> list[Any]:
    """Returns texts or rows of ids as a list. Raises ValueError for inputs that are neither."""
    if isinstance(inputs, str):
        return [inputs]
    wrong = isinstance(inputs, Mapping | bytes) or not isinstance(inputs, Iterable)
    if wrong or (isinstance(inputs, Tensor) and inputs.dim() == 0):
        raise ValueError(
            f"inputs are a {type(inputs).__name__}; give texts, or the rows of ids without padding"
        )
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in inputs]
    return [rows] if rows and isinstance(rows[0], int) else rows


def load(
    target: Model,
    drafter: Model | None = "max-gram",
    *,
    k: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    verifier: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    compile: Compile = "auto",
) -> SpeculativeDecoder:
    """Loads a target and a drafter, ready to decode.

    target, drafter: a folder, Hub name or loaded model; the drafter may also be a run's folder,
    "max-gram" (copies text, has no model) or None (plain decoding). k: draft tokens per round;
    default: as the drafter was trained, else 5. verifier: its name; auto is lossless. languages:
    of a multilingual target that is given by name. compile: off, on, auto (on a GPU). Raises
    ValueError for parts that do not fit each other.
    """
    target = _path_or_model(target, "target")
    drafter = _path_or_model("none" if drafter is None else drafter, "drafter")
    if isinstance(drafter, str) and (run := run_of(drafter)):
        drafter = str(run.drafter)
    if tokenizer is not None and not callable(tokenizer):
        raise ConfigError(f"tokenizer = {tokenizer!r}; give AutoTokenizer.from_pretrained(TARGET)")
    languages = {"source_language": source_language, "target_language": target_language}
    if any(languages.values()) and not isinstance(target, str):
        raise ConfigError(
            f"languages = {languages} are for a target given by name; for a loaded one set "
            "tokenizer.src_lang and generation_config.forced_bos_token_id"
        )
    chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling = validate_settings(SamplingConfig, chosen | {"seed": seed})
    length = validate_settings(StopConfig, {} if k is None else {"k": k})
    how = validate_settings(OnTarget, {"compile": compile}).compile
    check_read(sampling, sampling.model_dump(exclude_defaults=True))
    name = drafter if isinstance(drafter, str) else str(drafter.name_or_path)
    rule = validate_settings(VerifierConfig, {"kind": verifier}, "verifier")
    config = DecodeConfig(drafter=name, sampling=sampling, verifier=rule)
    if isinstance(target, str) and isinstance(drafter, str):
        pair = load_pair(TargetConfig(path=target, **languages), *check_methods(config))
    else:
        pair = _pair_of(target, drafter, name, languages)
    if k is None:
        trained = getattr(getattr(pair.drafter_model, "config", None), "k", None)
        length = StopConfig(k=trained or DEFAULT_K)
    config = config.model_copy(update={"stop": length})
    method, sampling = build_method(config, pair), Sampling.of(config.sampling)
    check_pairing(method.drafter, method.stop.rule, method.verifier.rule, sampling)
    compile_calls(how)
    decoder = method.decoder(pair.model, sampling, config.sampling.seed)
    return SpeculativeDecoder(decoder, tokenizer or pair.target.tokenizer)


def _path_or_model(value: Any, name: str) -> str | PreTrainedModel:
    """Returns a path as a string, `~` expanded, and a model as it is. Raises ConfigError else."""
    value = os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(value, str) and not hasattr(value, "name_or_path"):
        kind = type(value).__name__
        raise ConfigError(f"{name} is a {kind}; give a folder, a Hub name or a Transformers model")
    return value


def _pair_of(
    target: str | PreTrainedModel,
    drafter: str | PreTrainedModel,
    name: str,
    languages: Mapping[str, str | None],
) -> Pair:
    """Returns the pair if target or drafter (or both) are given as loaded models."""
    if isinstance(target, str):
        loaded = load_target(TargetConfig(path=target, **languages))
    else:
        loaded = LoadedTarget(target, None, str(target.name_or_path))
        check_finite(target, f"target {loaded.path!r}")
    kind, model = named_kind(name), None
    if kind is None:
        model = load_checked_drafter(loaded, drafter) if isinstance(drafter, str) else drafter
        part = drafter_for(loaded.model, model, "drafter")
    else:
        part = open_kind(kind, None, loaded.model)
    return Pair(loaded, CachedModel(loaded.model), {name: part}, {name: model})
