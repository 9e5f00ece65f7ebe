"""Sources read by an encoder, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.compiled import CompiledEncoder
from drafttrain.decoding.engine.compiling import enlist
from drafttrain.decoding.engine.families import read_encoder
from drafttrain.decoding.engine.products import choose_ways
from drafttrain.decoding.engine.stack import Rows, Stack, run_stack
from drafttrain.decoding.padding import padded
from drafttrain.decoding.types import Source

Encode = Callable[[Sequence[Source]], list[Tensor]]
"""The encoder's output of every source, [S, D] each."""
CLIPS_AT_ONCE = 2
"""Clips in a call on a CPU: one keeps all its units busy, and what many put out between layers
leaves its caches (8 take a sixth longer a clip, 24 a third)."""


class TextEncoder:
    """`Encode` of texts by a `Stack`, in one padded call."""

    def __init__(self, stack: Stack, padding: int | None) -> None:
        self.stack, self._padding = stack, padding
        self._compiled: CompiledEncoder | None = None
        choose_ways(stack)
        enlist(self)

    def compile(self, how: Compile) -> str:
        """Compile calls of one text (`compile_calls`); a line that says what came of it."""
        self._compiled = CompiledEncoder(self.stack)
        return self._compiled.prepare(how)

    def __call__(self, sources: Sequence[Source]) -> list[Tensor]:
        if self._compiled is not None and len(sources) == 1:
            states = self._compiled(sources[0].input_ids.to(self.stack.device))
            if states is not None:
                return [states]
        ids, mask = pad_texts(sources, self._padding, self.stack.device)
        lengths = [len(source.input_ids) for source in sources]
        seen = None if min(lengths) == max(lengths) else mask.bool()[:, None, None]
        places = torch.arange(max(lengths), device=ids.device).expand_as(ids)
        encoded = run_stack(self.stack, Rows(ids, places, None, seen, places), None)
        return [rows[:length] for rows, length in zip(encoded, lengths, strict=True)]


def given_encoding(sources: Sequence[Source]) -> list[Tensor]:
    """`Encode` of a drafter that reads the target's encoder. Raises ValueError for a source that
    the target has not encoded."""
    if any(source.encoded is None for source in sources):
        raise ValueError(
            "the drafter reads the target's encoder, but the source has not been encoded; decode "
            "it with its target, or give the encoder's output as Source.encoded"
        )
    return [source.encoded for source in sources]


def encoder_of(model: PreTrainedModel) -> Encode | None:
    """How a model's sources are read; None: it has no encoder."""
    if not model.config.is_encoder_decoder:
        return None
    stack = read_encoder(model)
    texts = None if stack is None else TextEncoder(stack, model.config.pad_token_id)

    def encode(sources: Sequence[Source]) -> list[Tensor]:
        if all(source.encoded is not None for source in sources):
            return given_encoding(sources)
        if texts is not None and all(source.is_text for source in sources):
            return texts(sources)
        return _encode_by_module(model, sources)

    return encode


def _encode_by_module(model: PreTrainedModel, sources: Sequence[Source]) -> list[Tensor]:
    """By the model's own encoder. Features are alike in shape, and take the model's precision."""
    at_once = CLIPS_AT_ONCE if model.device.type == "cpu" else len(sources)
    encoded = []
    for start in range(0, len(sources), at_once):
        inputs = [source.inputs for source in sources[start : start + at_once]]
        together = {
            name: torch.stack([own[name] for own in inputs]).to(model.device) for name in inputs[0]
        }
        floating = [name for name, value in together.items() if value.is_floating_point()]
        together |= {name: together[name].to(model.dtype) for name in floating}
        encoded += model.get_encoder()(**together)[0]
    return encoded


def pad_texts(
    sources: Sequence[Source], padding: int | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids of several texts and their mask (1 = token), padded on the right. Two [B, S]."""
    return padded([source.input_ids.to(device) for source in sources], padding or 0)
