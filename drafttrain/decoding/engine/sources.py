"""Sources for a model: the input ids and the prefix that its decoder starts from."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.types import Source


def make_source(input_ids: Sequence[int] | Tensor, model: PreTrainedModel) -> Source:
    """Returns a source from the tokenizer's ids, on the model's device.

    Its prefix is the prompt itself, or the start token of an encoder-decoder model, as in
    `generate`. Tokens that the generation_config forces are left to the logits processors.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long, device=device_of(model))
    if not model.config.is_encoder_decoder:
        return Source.of_text(ids, ids)
    start = start_token(model.generation_config)
    return Source.of_text(ids, torch.tensor([start], device=ids.device))


def source_for_model(source: Source, model: PreTrainedModel) -> Source:
    """Returns the source for another model, on its device, with its start token and without encoder
    states. Raises ValueError if a decoder-only model gets a source without text."""
    if not model.config.is_encoder_decoder:
        return make_source(source.input_ids, model)
    inputs = {name: value.to(device_of(model)) for name, value in source.inputs.items()}
    prefix = source.prefix.to(device_of(model), copy=True)
    prefix[0] = start_token(model.generation_config)
    return replace(source, inputs=inputs, prefix=prefix, encoded=None)


def start_token(config: GenerationConfig) -> int:
    """Returns the decoder start token of an encoder-decoder model. Raises ValueError if not set."""
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if not isinstance(start, int):
        raise ValueError(
            f"the target's generation_config has decoder_start_token_id={start!r}; set it to one "
            "token id"
        )
    return start


def check_length(length: int, limit: int | None) -> None:
    """Raises ValueError if a source has no tokens, or more than `limit`."""
    if length == 0:
        raise ValueError("the source has no tokens; leave empty inputs out")
    if limit is not None and length > limit:
        raise ValueError(
            f"the source has {length} tokens but the model takes {limit}; shorten it or leave it "
            "out"
        )
