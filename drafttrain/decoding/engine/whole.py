"""Families that are not known: the whole model runs, one sequence after the other.

Each sequence has a cache of Transformers' own. `Cache.crop` is never used: its meaning changed
between releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from drafttrain.config.commands import Compile
from drafttrain.decoding.engine.calls import Feed, StepOutput, record
from drafttrain.decoding.engine.compiling import enlist
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.stack import fit_scores, known_ids
from drafttrain.decoding.types import Source


class OwnCache:
    """The cache of one sequence."""

    def __init__(self, encoder_outputs: Any | None) -> None:
        self.encoder_outputs = encoder_outputs
        # without a configuration: with one, sliding-window layers would drop states
        self.own = DynamicCache()
        """Self-attention's part, a column a token."""
        self.cache: DynamicCache | EncoderDecoderCache = self.own
        if encoder_outputs is not None:
            self.cache = EncoderDecoderCache(self.own, DynamicCache())

    def move(self, first: int, columns: Sequence[int]) -> None:
        last, index = first + len(columns), torch.tensor(columns)
        for layer in self.own.layers:
            index = index.to(layer.keys.device)
            for states in (layer.keys, layer.values):
                states[:, :, first:last] = states.index_select(2, index)

    def cut(self, columns: int) -> None:
        for layer in self.own.layers:
            layer.keys = layer.keys[:, :, :columns]
            layer.values = layer.values[:, :, :columns]

    def keys_values(self, layer: int, columns: int) -> tuple[Tensor, Tensor]:
        found = self.own.layers[layer]
        return found.keys[0, :, :columns], found.values[0, :, :columns]

    def cross_keys_values(self, layer: int) -> None:
        """Not at hand: where a model of its own code keeps them is not known."""


class Whole:
    """How a model of a family that is not known is called: with chains only."""

    takes_branches = False
    stack = None

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None) -> None:
        """vocabulary: tokens that are fed and given scores; None: its own."""
        self.model, self._vocabulary = model, vocabulary
        self.device = model.device
        self._keeps_rows = model._supports_logits_to_keep()
        enlist(self)

    def compile(self, how: Compile) -> str:
        """Nothing; a line that says why."""
        kind = self.model.config.model_type
        return f"a {kind!r} model runs uncompiled: how its family computes is not known"

    def begin(self, sources: Sequence[Source]) -> list[SequenceState]:
        """A cache for each new sequence; encodes its source, where there is an encoder."""
        if not self.model.config.is_encoder_decoder:
            return [SequenceState(OwnCache(None), source) for source in sources]
        states = []
        for source in sources:
            inputs = {name: value[None].to(self.device) for name, value in source.inputs.items()}
            encoded = self.model.get_encoder()(**inputs)
            states.append(SequenceState(OwnCache(encoded), source, encoded[0][0]))
        return states

    def call(self, feeds: Sequence[Feed], layers: Sequence[int] = ()) -> list[StepOutput]:
        """Feed every sequence its chain."""
        found = []
        for feed in feeds:
            with keeping(self.model, layers) as kept:
                logits, hidden = self._call(feed)
            if logits.dtype in (torch.float16, torch.bfloat16):
                logits = logits.float()
            if self._vocabulary is not None:
                logits = fit_scores(logits, self._vocabulary)
            found.append(StepOutput(logits, hidden, kept))
        record(feeds)
        return found

    def _call(self, feed: Feed) -> tuple[Tensor, Tensor]:
        input_ids = torch.tensor([feed.tokens], device=self.device)
        if self._vocabulary is not None:
            input_ids = known_ids(input_ids, self.model.get_input_embeddings().num_embeddings)
        own, rows = feed.state.columns, feed.rows
        inputs = {"past_key_values": own.cache, "use_cache": True, "output_hidden_states": True}
        if self._keeps_rows:
            inputs["logits_to_keep"] = rows
        if own.encoder_outputs is not None:
            output = self.model(
                encoder_outputs=own.encoder_outputs, decoder_input_ids=input_ids, **inputs
            )
            return output.logits[0, -rows:], output.decoder_hidden_states[-1][0]
        output = self.model(input_ids=input_ids, **inputs)
        return output.logits[0, -rows:], output.hidden_states[-1][0]


@contextmanager
def keeping(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Keep what some decoder layers put out in the calls made inside: layer -> [N, D].

    -1 is the last hidden state, which is put out in any case.
    """
    kept: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for number in set(layers) - {-1}:
            layer = decoder_layers(model.get_decoder())[number]
            hook = layer.register_forward_hook(partial(_keep, kept, number))
            hooks.callback(hook.remove)
        yield kept


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
