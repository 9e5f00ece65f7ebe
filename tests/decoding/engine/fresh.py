"""A model run afresh over a whole path, and caches compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    EncoderDecoderCache,
    GPTJConfig,
    GPTJForCausalLM,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
)

from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.types import Source
from tests.comparing import close
from tests.tiny_models import (
    BART_SHAPE,
    CAUSAL_FAMILIES,
    FAMILIES,
    SPEECH_FAMILIES,
    T5_SHAPE,
    VOCAB,
    tiny_model,
    tiny_source,
)

SUPPORTED = (*CAUSAL_FAMILIES, *FAMILIES, *SPEECH_FAMILIES, "mt5")
LENGTHS = (3, 9, 1, 6)
"""Of the sources of a batch."""
WIDE = {"vocab_size": VOCAB, "hidden_size": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}


def fresh(model: PreTrainedModel, source: Source, tokens: list[int]):
    """The whole path through the model's own forward, without a cache from before."""
    inputs = {"input_ids": torch.tensor([tokens])}
    if model.config.is_encoder_decoder:
        own = {
            name: value[None].to(model.dtype) if value.is_floating_point() else value[None]
            for name, value in source.inputs.items()
        }
        inputs = own | {"decoder_input_ids": inputs["input_ids"]}
    with torch.inference_mode():
        return model(**inputs, use_cache=True, output_hidden_states=True)


def sources_of(model: PreTrainedModel, lengths: Sequence[int] = LENGTHS) -> list[Source]:
    generator = torch.Generator().manual_seed(2)
    return [
        tiny_source(torch.randint(4, VOCAB, (length,), generator=generator), model)
        for length in lengths
    ]


def last_hidden(output) -> torch.Tensor:
    states = output.get("decoder_hidden_states") or output.hidden_states
    return states[-1][0]


def any_model(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if family == "m2m100":
        start = {"decoder_start_token_id": 1}
        model = M2M100ForConditionalGeneration(M2M100Config(**(BART_SHAPE | start)))
    elif family == "gptj":
        model = GPTJForCausalLM(GPTJConfig(**WIDE, rotary_dim=2, n_positions=64))
    elif family == "bloom":
        model = BloomForCausalLM(BloomConfig(**WIDE))
    elif family == "mt5":
        model = MT5ForConditionalGeneration(MT5Config(**T5_SHAPE))
    else:
        return tiny_model(family)
    return model.double().eval()


def precision_of(model: PreTrainedModel) -> float:
    """Eager attention takes its softmax in float32, and GPT-J its scores."""
    config = model.config
    single = config._attn_implementation == "eager" or config.model_type == "gptj"
    return 1e-5 if single else 1e-10


def close_caches(state: SequenceState, expected, precision: float = 1e-10) -> None:
    """The keys and values of a sequence are those of a cache of Transformers."""
    own, across = expected, None
    if isinstance(expected, EncoderDecoderCache):
        own, across = expected.self_attention_cache, expected.cross_attention_cache
    for number, layer in enumerate(own.layers):
        close_layer(keys_values(state, number), layer, precision)
        if across is not None:
            close_layer(cross_keys_values(state, number), across.layers[number], precision)


def close_layer(seen: tuple[Tensor, Tensor], layer, precision: float) -> None:
    for part, wanted in zip(seen, (layer.keys, layer.values), strict=True):
        close(part, wanted, precision)


def keys_values(state: SequenceState, layer: int) -> tuple[Tensor, Tensor]:
    """As Transformers holds them: two [1, heads, C, head_dim]."""
    return tuple(one[None] for one in state.columns.keys_values(layer, state.cached))


def cross_keys_values(state: SequenceState, layer: int) -> tuple[Tensor, Tensor]:
    """As Transformers holds them: two [1, heads, S, head_dim]."""
    cache, row = state.columns.cache, state.columns.number
    length = cache.source_lengths[row]
    return tuple(held[row : row + 1, :, :length] for held in cache.cross[layer])


PATHS = [
    [5, 9, 17],  # the prompt alone
    [5, 9, 17, 8, 30, 21, 6],  # one more token than was drafted: all accepted, and a bonus
    [5, 9, 17, 8, 30, 21, 6],  # nothing new
    [5, 9, 17, 8, 11],  # some rejected
    [5, 9, 17],  # back
    [7, 9, 17, 22, 23],  # another text from the first token on
    [7, 9, 17, 22, 23, *range(4, 34)],
]
