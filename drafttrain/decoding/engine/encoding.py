"""Sources read by an encoder, several at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.padding import padded
from drafttrain.decoding.types import Source


class EncoderOutput(BaseModelOutput):
    """The encoder's states, for families that look for more than these, too."""

    attention_mask = router_logits = None


CLIPS_AT_ONCE = 2
"""Clips in a call on a CPU: one keeps all its units busy, and what many put out between layers
leaves its caches (8 take a sixth longer a clip, 24 a third)."""


def given_encoding(sources: Sequence[Source]) -> list[Tensor]:
    """The encoder's output that sources bring along, [S, D] each. Raises ValueError for a source
    that the target has not encoded."""
    if any(source.encoded is None for source in sources):
        raise ValueError(
            "the drafter reads the target's encoder, but the source has not been encoded; decode "
            "it with its target, or give the encoder's output as Source.encoded"
        )
    return [source.encoded for source in sources]


def encode(model: PreTrainedModel, sources: Sequence[Source]) -> list[Tensor]:
    """What a model's encoder puts out, [S, D] each; what sources bring along is taken as it is.

    Texts are padded to one length. Features are alike in shape, and take the model's precision.
    """
    if all(source.encoded is not None for source in sources):
        return given_encoding(sources)
    encoder, device = model.get_encoder(), device_of(model)
    if all(source.is_text for source in sources):
        ids, mask = pad_texts(sources, model.config.pad_token_id, device)
        lengths = [len(source.input_ids) for source in sources]
        given = {} if min(lengths) == max(lengths) else {"attention_mask": mask}
        states = encoder(input_ids=ids, **given)[0]
        return [rows[:length] for rows, length in zip(states, lengths, strict=True)]
    at_once = CLIPS_AT_ONCE if device.type == "cpu" else len(sources)
    encoded: list[Tensor] = []
    for start in range(0, len(sources), at_once):
        inputs = [source.inputs for source in sources[start : start + at_once]]
        together = {
            name: torch.stack([own[name] for own in inputs]).to(device) for name in inputs[0]
        }
        floating = [name for name, value in together.items() if value.is_floating_point()]
        together |= {name: together[name].to(model.dtype) for name in floating}
        encoded += encoder(**together)[0]
    return encoded


def pad_texts(
    sources: Sequence[Source], padding: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids of several texts and their mask (1 = token), padded on the right. Two [B, S]."""
    return padded([source.input_ids.to(device) for source in sources], padding or 0)
