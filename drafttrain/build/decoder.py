"""A target with a drafter in a few lines: `drafttrain.load`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.build.drafters import drafter_for, open_kind
from drafttrain.build.method import Method, build_method, build_sampling, build_verifier
from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import load_pair
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import Compile
from drafttrain.config.decode import DecodeConfig, SamplingConfig, VerifierConfig
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import named_kind
from drafttrain.data.inputs.rows import tokenize_texts
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.engine import compile_calls
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Source
from drafttrain.decoding.verifiers import check_pairing
from drafttrain.models.drafters import load_drafter_beside
from drafttrain.models.loading import LoadedTarget, load_target

DEFAULT_K = 5
"""Draft tokens per round of drafters that were trained for no number of them."""
Inputs = str | Sequence[str] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True)
class Generation:
    """What one input was continued with, or turned into."""

    tokens: list[int]
    """New tokens, EOS included where it came."""
    text: str | None
    """The same without special tokens; None without a tokenizer."""
    rounds: int
    """Calls of the target."""
    drafted: int
    """Draft tokens that the target scored."""
    accepted: int
    """Those of them that were accepted."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per call of the target, bonus token included."""
        return len(self.tokens) / max(self.rounds, 1)


class SpeculativeDecoder:
    """Decodes with a target and a drafter; outputs are the target's own where `lossless` is true:
    equal tokens in greedy decoding, the same distribution under sampling."""

    def __init__(self, decoder: Decoder, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.decoder, self.tokenizer = decoder, tokenizer
        self.lossless = decoder.verifier.lossless

    def generate(
        self, inputs: Inputs, max_new_tokens: int = 128, batch_size: int = 1
    ) -> list[Generation]:
        """Decode texts or token ids, `batch_size` at once; one generation an input, in order.

        Raises ValueError for an empty or over-long input, for texts without a tokenizer, and
        NotFinite where the target's logits are no numbers.
        """
        found = self.decoder.decode_all(self._sources(inputs), max_new_tokens, batch_size)
        return [self._generation(output) for output in found]

    def stream(self, text: str | Sequence[int], max_new_tokens: int = 128) -> Iterator[list[int]]:
        """The tokens of one input as each round commits them. Errors: as `generate`."""
        one = text if isinstance(text, str) else [text]
        for played in self.decoder.decode(self._sources(one), max_new_tokens, 1):
            yield list(played.emitted)

    def _sources(self, inputs: Inputs) -> list[Source]:
        model = self.decoder.target.model
        if isinstance(inputs, str):
            inputs = [inputs]
        if isinstance(inputs, Tensor):
            inputs = inputs.tolist()
        if len(inputs) and isinstance(inputs[0], str):
            if self.tokenizer is None:
                raise ValueError("texts need a tokenizer: load(..., tokenizer=...), or give ids")
            inputs = tokenize_texts(self.tokenizer, inputs, not model.config.is_encoder_decoder)
        return [make_source(ids, model) for ids in inputs]

    def _generation(self, output: Output) -> Generation:
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(output.tokens, skip_special_tokens=True)
        rounds = output.rounds
        return Generation(
            output.tokens,
            text,
            len(rounds),
            sum(len(played.drafted) for played in rounds),
            sum(len(played.path) for played in rounds),
        )


def load(
    target: str | PreTrainedModel,
    drafter: str | PreTrainedModel = "max-gram",
    *,
    k: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    verifier: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    decode: DecodeConfig | None = None,
    compile: Compile = "auto",
) -> SpeculativeDecoder:
    """A target with a drafter, ready to decode.

    target, drafter: folders, Hub names or loaded models; drafters also "max-gram" (copies, no
    model) and "none" (plain decoding). k: draft tokens per round; None: as many as the drafter was
    trained to draft, else 5. verifier: a rule's name; auto: lossless. decode: a whole method
    (heads, trees, cascades) instead, for models given by name. compile: off, on, auto (on a GPU).
    Raises ConfigError or ValueError for parts that do not go together.
    """
    if decode is not None:
        method, loaded = _method_of(target, drafter, decode)
        sampling, seed = decode.sampling, decode.sampling.seed
    else:
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        loaded = _loaded(target, tokenizer)
        part, trained = _drafter_of(loaded, drafter)
        rule = build_verifier(VerifierConfig(kind=verifier), build_sampling(sampling))
        method = Method(part, FixedLength(k or trained or DEFAULT_K), rule)
    decoder = method.decoder(CachedModel(loaded.model), build_sampling(sampling), seed)
    check_pairing(method.drafter, method.stop.rule, method.verifier.rule, decoder.sampling)
    compile_calls(compile)
    return SpeculativeDecoder(decoder, tokenizer or loaded.tokenizer)


def _method_of(
    target: str | PreTrainedModel, drafter: str | PreTrainedModel, decode: DecodeConfig
) -> tuple[Method, LoadedTarget]:
    if not (isinstance(target, str) and isinstance(drafter, str)):
        raise ConfigError("decode= takes target and drafter by name; give paths, or k and verifier")
    decode = decode.model_copy(update={"drafter": drafter})
    found = check_methods(decode)
    pair = load_pair(TargetConfig(path=target), drafter, found.companions, found.table)
    return build_method(decode, pair), pair.target


def _loaded(
    target: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedTarget:
    if isinstance(target, str):
        return load_target(TargetConfig(path=target))
    return LoadedTarget(target, tokenizer, str(target.name_or_path))


def _drafter_of(target: LoadedTarget, drafter: str | PreTrainedModel) -> tuple[Drafter, int | None]:
    """A drafter, and how many tokens it was trained to draft, where its config.json says so."""
    if isinstance(drafter, str):
        kind = named_kind(drafter)
        if kind is not None:
            return open_kind(kind, None, target.model), None
        drafter = load_drafter_beside(target, drafter)
    part = drafter_for(target.model, drafter, "drafter")
    return part, getattr(drafter.config, "k", None)
