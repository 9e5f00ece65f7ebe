"""What one sequence is decoded from, as each model's decoder starts from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.types import Source


def make_source(
    input_ids: Sequence[int] | Tensor, model: PreTrainedModel, forced: Sequence[int] = ()
) -> Source:
    """A source from the tokenizer's ids, on the model's device.

    A decoder-only model continues the prompt itself. The decoder of an encoder-decoder model starts
    from its start token, as in `generate`, and the tokens forced behind it, if any; what
    generation_config forces is a logits processor.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long, device=device_of(model))
    if not model.config.is_encoder_decoder:
        return Source.of_text(ids, ids)
    prefix = torch.tensor([start_token(model), *forced], device=device_of(model))
    return Source.of_text(ids, prefix)


def own_source(source: Source, model: PreTrainedModel) -> Source:
    """The same source as another model decodes it, on its device.

    Where that model's decoder starts from another token, it takes the place of the first one.
    """
    if not model.config.is_encoder_decoder:
        return make_source(source.input_ids, model)
    inputs = {name: value.to(device_of(model)) for name, value in source.inputs.items()}
    prefix = source.prefix.to(device_of(model), copy=True)
    prefix[0] = start_token(model)
    return replace(source, inputs=inputs, prefix=prefix, encoded=None)


def start_token(model: PreTrainedModel) -> int:
    """The token that the decoder of an encoder-decoder model starts from. Raises ValueError."""
    config = model.generation_config
    start = config.decoder_start_token_id
    if start is None:
        start = config.bos_token_id
    if not isinstance(start, int):
        raise ValueError(
            f"the target's generation_config has decoder_start_token_id={start!r}; one token id "
            "is needed"
        )
    return start


def check_length(length: int, limit: int | None) -> None:
    """Refuse a source of so many tokens that is empty or too long. Raises ValueError."""
    if length == 0:
        raise ValueError("the source holds no tokens; leave empty inputs out")
    if limit is not None and length > limit:
        raise ValueError(
            f"the source has {length} tokens but the model takes {limit}; shorten it or leave it "
            "out"
        )
