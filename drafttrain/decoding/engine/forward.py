"""One call of a model on tokens that follow what is cached: masks, positions, projection.

Known families are called in the cheapest way that gives their own numbers: the masks are ready
made, only rows that are asked for go through the output projection, and the layers of rotary
families are called directly. Other families run whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import (
    BART_LIKE,
    KNOWN,
    PLAIN_CAUSAL,
    ROTARY,
    T5_LIKE,
    position_limit,
)
from drafttrain.decoding.engine.positions import biased_positions, embedded_positions

STRIP = 64
"""Most new tokens whose mask is cut from a strip that is kept."""


@dataclass(frozen=True)
class Branches:
    """What new tokens that are no chain see of C cached and N new columns, and where they stand."""

    visible: Tensor
    """[N, C + N] bool."""
    positions: Sequence[int]
    """[N] of the new tokens."""
    cached_positions: Sequence[int]
    """[C] of the cached ones."""


class Forward:
    """How one model is called. Nothing of a sequence is kept here."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        kind, ready = type(model), model.config._attn_implementation in ("sdpa", "eager")
        self._decoder = model.get_decoder()
        self.takes_branches = kind in KNOWN and ready
        """Whether a mask and a position can be given for every token: trees and branches."""
        self._kind = kind
        self._additive = model.config._attn_implementation == "eager"
        self._layers_alone = kind in ROTARY and ready
        self._spare_masks = self._layers_alone and not self._additive
        self._run = self._choose(kind)
        config = model.config
        scaled = kind is T5ForConditionalGeneration and config.scale_decoder_outputs
        self._scale = config.d_model**-0.5 if scaled else None
        self._keeps_rows = model._supports_logits_to_keep()
        self._limit = position_limit(model.config)
        self._places = torch.empty(1, 0, dtype=torch.long)
        self._rotations: tuple[Tensor, Tensor] = (torch.empty(1, 0), torch.empty(1, 0))
        self._strip = torch.empty(STRIP, 0)

    @contextmanager
    def keeping(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Keep what some decoder layers put out in the calls made inside: layer -> [N, D].

        -1 is the last hidden state, which is put out in any case.
        """
        kept: dict[int, Tensor] = {}
        with ExitStack() as hooks:
            for number in set(layers) - {-1}:
                layer = decoder_layers(self._decoder)[number]
                hook = layer.register_forward_hook(partial(_keep, kept, number))
                hooks.callback(hook.remove)
            yield kept

    def chain(
        self,
        tokens: Sequence[int],
        rows: int,
        cached: int,
        cache: Cache,
        encoder_outputs: BaseModelOutput | None,
    ) -> tuple[Tensor, Tensor]:
        """Feed a chain after `cached` tokens.

        Shapes: tokens [N] -> logits [rows, V] of the last rows, hidden [N, D].
        """
        new = len(tokens)
        mask = self._causal_mask(cached, new) if self.takes_branches else None
        self._know_positions(cached + new)
        positions = slice(cached, cached + new)
        return self._call(tokens, rows, mask, positions, cache, encoder_outputs)

    def tree(
        self,
        tokens: Sequence[int],
        rows: int,
        branches: Branches,
        cache: Cache,
        encoder_outputs: BaseModelOutput | None,
    ) -> tuple[Tensor, Tensor]:
        """Feed tokens that each see the columns marked visible, at positions of their own.

        Shapes: tokens [N] -> as `chain`.
        """
        mask = self._as_mask(branches.visible.to(self.device))[None, None]
        self._know_positions(max(branches.positions) + 1)
        positions = torch.tensor(branches.positions, device=self.device)
        with self._standing_at(positions, branches):
            return self._call(tokens, rows, mask, positions, cache, encoder_outputs)

    def _standing_at(self, positions: Tensor, branches: Branches) -> AbstractContextManager:
        """What hands positions to a decoder that has no argument for them."""
        if self._kind in BART_LIKE:
            return embedded_positions(self._decoder, positions)
        if self._kind in T5_LIKE:
            cached = torch.tensor(branches.cached_positions, dtype=torch.long, device=self.device)
            return biased_positions(self._decoder, positions, torch.cat([cached, positions]))
        return nullcontext()

    def _call(self, tokens, rows, mask, positions, cache, encoder_outputs) -> tuple[Tensor, Tensor]:
        input_ids = torch.tensor([tokens], device=self.device)
        logits, hidden = self._run(input_ids, rows, mask, positions, cache, encoder_outputs)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        return logits, hidden

    def _choose(self, kind: type[PreTrainedModel]):
        if kind in (*BART_LIKE, T5ForConditionalGeneration):
            return self._run_decoder
        if self._layers_alone:
            return self._run_layers
        return self._run_body if kind in PLAIN_CAUSAL else self._run_whole

    def _run_layers(self, input_ids, rows, mask, positions, cache, encoder_outputs):
        body = self._decoder
        hidden = body.embed_tokens(input_ids)
        cos, sin = self._rotations
        rotary = cos[:, positions], sin[:, positions]
        for layer in body.layers:
            hidden = layer(
                hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache
            )
        hidden = body.norm(hidden)[0]
        return self.model.lm_head(hidden[-rows:]), hidden

    def _run_body(self, input_ids, rows, mask, positions, cache, encoder_outputs):
        hidden = self._decoder(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=self._places[:, positions],
            past_key_values=cache,
            use_cache=True,
        )[0][0]
        return self.model.lm_head(hidden[-rows:]), hidden

    def _run_decoder(self, input_ids, rows, mask, positions, cache, encoder_outputs):
        model = self.model
        hidden = self._decoder(
            input_ids=input_ids,
            attention_mask=mask,
            encoder_hidden_states=encoder_outputs[0],
            past_key_values=cache,
            use_cache=True,
        )[0][0]
        asked = hidden[-rows:]
        if isinstance(model, BART_LIKE):
            return model.lm_head(asked) + model.final_logits_bias, hidden
        if self._scale is not None:
            asked = asked * self._scale
        return model.lm_head(asked), hidden

    def _run_whole(self, input_ids, rows, mask, positions, cache, encoder_outputs):
        inputs = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
        if self._keeps_rows:
            inputs["logits_to_keep"] = rows
        if encoder_outputs is not None:
            output = self.model(
                encoder_outputs=encoder_outputs,
                decoder_input_ids=input_ids,
                decoder_attention_mask=mask,
                **inputs,
            )
            return output.logits[0, -rows:], output.decoder_hidden_states[-1][0]
        output = self.model(input_ids=input_ids, **inputs)
        return output.logits[0, -rows:], output.hidden_states[-1][0]

    def _know_positions(self, length: int) -> None:
        """Have positions, and the rotations that belong to them, for `length` tokens or more.

        Rotations depend on nothing but the position: where they change with the length of the
        text, `position_limit` ends before they do.
        """
        if self._kind not in PLAIN_CAUSAL or length <= self._places.shape[1]:
            return
        size = max(256, 2 * length)
        if self._limit is not None:
            size = min(size, self._limit)
        self._places = torch.arange(max(size, length), device=self.device)[None]
        if self._layers_alone:
            like = torch.empty(0, dtype=self.model.dtype, device=self.device)
            self._rotations = self._decoder.rotary_emb(like, position_ids=self._places)

    def _causal_mask(self, cached: int, new: int) -> Tensor | None:
        """Mask of a chain over cached and new columns, [1, 1, new, all].

        None where nothing is hidden, or where the attention knows by itself that all is causal.
        """
        if self._spare_masks and (new == 1 or cached == 0):
            return None
        if new > STRIP:
            places = torch.arange(cached + new, device=self.device)
            return self._as_mask(places <= places[cached:, None])[None, None]
        reach = self._strip.shape[1] - STRIP
        if cached > reach:
            reach = 2 * cached
            places = torch.arange(-reach, STRIP, device=self.device)
            self._strip = self._as_mask(places <= places[reach:, None])
        return self._strip[None, None, :new, reach - cached : reach + new]

    def _as_mask(self, visible: Tensor) -> Tensor:
        """What the attention takes: true where visible, or numbers to add where it is eager."""
        if not self._additive:
            return visible
        hidden = torch.finfo(self.model.dtype).min
        return torch.zeros_like(visible, dtype=self.model.dtype).masked_fill_(~visible, hidden)


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """The layers of a decoder, the first one first. Raises ValueError where they are not known."""
    for name in ("layers", "block", "h"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(
        f"the layers of a {type(decoder).__name__} are not known; use a drafter that reads the "
        "last hidden state alone"
    )


def _keep(kept: dict[int, Tensor], number: int, layer: nn.Module, inputs: Any, output: Any) -> None:
    states = output if isinstance(output, Tensor) else output[0]
    kept[number] = states[0]
