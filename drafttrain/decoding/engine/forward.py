"""How models are called on many sequences at once: chains of any lengths and draft trees.

A Transformers model's whole `forward` computes, with its scales, soft caps, adapters and hooks. It
is given a cache whose layers write where the call says (`cache.py`), an additive mask and explicit
positions. Positions that a `forward` does not take are put into its decoder for the time of the
call, and captured layers are hooked for it: the model is left as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import (
    UNMASKED_ALONE,
    attention_windows,
    device_of,
    encoder_width,
    layer_masks,
    unwrapped,
)
from drafttrain.decoding.engine.cache import KeysValues
from drafttrain.decoding.engine.positions import (
    Current,
    Replacement,
    positions_inside,
    replacing,
)
from drafttrain.decoding.sampling import exact_enough
from drafttrain.models.draftable import UNDRAFTED
from drafttrain.models.spec_drafter.model import SpecDrafter

ARBITRARY_MASKS = ("sdpa", "eager")
"""Attention implementations that take any mask."""


class EncoderOutput(BaseModelOutput):
    """The encoder's states, for families that look for more than these, too."""

    attention_mask = router_logits = None


@dataclass
class ForwardBatch:
    """What one call computes: N new tokens of each of B sequences, shorter ones padded."""

    ids: Tensor
    """[B, N]."""
    positions: Tensor
    """[B, N]."""
    visible: Tensor
    """[B, N, C] true where a token sees a column of the C that the call reads, its own included."""
    key_positions: Tensor | None
    """[B, C] positions of the columns, for models whose masks or biases depend on distances."""
    scored: Tensor | None
    """[R] rows of 0..N-1 that some sequence wants logits of, rising; None: all."""
    cache: Cache
    sources: list[KeysValues] = field(default_factory=list)
    """Keys and values of cross-attention, [B, heads, S, head_dim] a layer; none before a sequence's
    first call."""
    source_mask: Tensor | None = None
    """[B, S] true where a source has a state; None: everywhere."""
    encoded: Tensor | None = None
    """[B, S, D] the encoder's output, of sequences that are called for the first time."""
    embedded: Tensor | None = None
    """[B, N, D] what is fed instead of embedded tokens."""
    states: Tensor | None = None
    """[B, N, E] target hidden states that come with the tokens; zeros where there is none."""
    has_states: Tensor | None = None
    """[B, N, 1] true where a token has one, if only zeros."""
    layers: Sequence[int] = ()
    """Decoder layers whose outputs are wanted."""


@dataclass
class BatchOutput:
    logits: Tensor
    """[B, R, V] of the scored rows."""
    hidden: Tensor
    """[B, N, D] last hidden states, after the final norm."""
    layers: Mapping[int, Tensor] = field(default_factory=dict)
    """[B, N, D] of each wanted layer."""
    sources: list[KeysValues] = field(default_factory=list)
    """Keys and values of cross-attention that a first call made, as in `ForwardBatch`."""


class Body(Protocol):
    """A decoder as the engine calls it."""

    device: torch.device
    modules: Sequence[nn.Module]
    """They hold all that it computes with."""
    needs_key_positions: bool
    cross_attends: bool
    """Whether it reads a source."""
    masks_sources: bool
    """Whether a part of a source can be masked; else sources of one call have one length."""

    def prepared(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        """Where `compute` can be called, for outputs of these layers."""
        ...

    def compute(self, call: ForwardBatch) -> BatchOutput:
        """One call, inside `prepared`; torch.compile can trace it."""
        ...


class TransformersBody:
    """A Transformers model, or what wraps one, called through its own `forward`."""

    def __init__(
        self,
        model: PreTrainedModel,
        draftable: Tensor | None = None,
        vocabulary: int | None = None,
        places_tokens: bool = True,
    ) -> None:
        """draftable [N]: the tokens to compute scores of; None: all. vocabulary: tokens that are
        given scores, where not the model's own. places_tokens: masks and positions are given; else
        the model makes its own, for one chain a call."""
        self.model, self.device, self.modules = model, device_of(model), [model]
        inner = unwrapped(model)
        self.cross_attends = bool(model.config.is_encoder_decoder)
        self._encoder_width = encoder_width(inner) if self.cross_attends else 0
        self._takes = inspect.signature(type(inner).forward).parameters
        self._decoder = inner.get_decoder()
        self._placed = places_tokens
        self._vocabulary = vocabulary
        taken = "decoder_position_ids" if self.cross_attends else "position_ids"
        inside = inspect.signature(type(self._decoder).forward).parameters
        passes_on = any(one.kind is one.VAR_KEYWORD for one in self._takes.values())
        takes = taken in self._takes or (passes_on and "position_ids" in inside)
        self._position_name = taken if places_tokens and takes else None
        self._current = Current()
        self._replaced: list[Replacement] = []
        if places_tokens and self._position_name is None:
            self._replaced = list(positions_inside(self._decoder, self._current))
        if places_tokens and isinstance(inner, UNMASKED_ALONE):
            for layer in decoder_layers(self._decoder):
                for attention in (layer.self_attn, layer.encoder_attn):
                    masked = _masking(attention, self._current)
                    self._replaced.append((attention, "forward", masked))
        self._windows = attention_windows(model.config)
        windowed = any(window is not None for window in self._windows.values())
        biased = any(name == "compute_bias" for _, name, _ in self._replaced)
        self.needs_key_positions = places_tokens and (windowed or biased)
        texts = inner.main_input_name == "input_ids"  # else a mask is of sound, not of states
        self.masks_sources = texts and "encoder_attention_mask" in inside
        self._head = None
        if draftable is not None:
            self._head = DraftableHead(inner.get_output_embeddings(), draftable)
            self._replaced.append((self._head.module, "forward", self._head))
        if isinstance(inner, SpecDrafter) and inner.fusion is not None:
            self._replaced.append((inner.embed_tokens, "forward", _fusing(inner, self._current)))
        self._kept: dict[int, Tensor] = {}
        self._hooks = {-1: _keeping(self._kept, -1)}

    @contextmanager
    def prepared(self, layers: Sequence[int]) -> Iterator[None]:
        """Positions are put inside the decoder, layers are hooked, and attention takes masks."""
        own = self.model.config._attn_implementation
        if self._head is not None:
            self._head.refresh()
        with ExitStack() as stack:
            if self._replaced:
                stack.enter_context(replacing(self._replaced))
            for number in {-1, *layers}:
                module = self._decoder if number == -1 else decoder_layers(self._decoder)[number]
                hook = self._hooks.setdefault(number, _keeping(self._kept, number))
                stack.callback(module.register_forward_hook(hook).remove)
            if self._placed and own not in ARBITRARY_MASKS:
                stack.callback(self.model.set_attn_implementation, own)
                self.model.set_attn_implementation("sdpa")
            yield

    def compute(self, call: ForwardBatch) -> BatchOutput:
        self._current.call = call
        given = self._inputs(call)
        output = self.model(**given, use_cache=True)
        logits = output.logits
        if "logits_to_keep" not in given and call.scored is not None:
            logits = logits[:, call.scored]
        logits = exact_enough(logits)
        if self._head is not None:
            logits = self._head.drafted(logits)
        if self._vocabulary is not None:
            logits = fit_scores(logits, self._vocabulary)
        cache, made = given["past_key_values"], []
        if call.encoded is not None:
            made = [(layer.keys, layer.values) for layer in cache.cross_attention_cache.layers]
        kept = {number: self._kept[number] for number in (-1, *call.layers)}
        self._kept.clear()
        self._current.call = None
        return BatchOutput(logits, kept.pop(-1), kept, made)

    def run_decoder(self, call: ForwardBatch) -> Tensor:
        """Last hidden states [B, N, D] of an encoder-decoder's decoder alone, with gradients.

        call.encoded holds the states [B, S, D] that it reads; call.cache may be None.
        """
        mask = additive(call.visible, self.model.dtype)[:, None]
        given: dict[str, Any] = {
            "input_ids": call.ids,
            "attention_mask": layer_masks(self._windows, mask, call.positions, call.key_positions),
            "encoder_hidden_states": call.encoded,
            "past_key_values": call.cache,
            "use_cache": call.cache is not None,
        }
        if self._position_name is not None:
            given["position_ids"] = call.positions
        if self.masks_sources and call.source_mask is not None:
            there = call.source_mask.bool()[
                :, None, None
            ]  # as it is added: nothing asks the device
            given["encoder_attention_mask"] = additive(there, self.model.dtype)
        self._current.call = call
        with replacing(self._replaced):
            hidden = self._decoder(**given)[0]
        self._current.call = None
        return hidden

    def _inputs(self, call: ForwardBatch) -> dict[str, Any]:
        ids = call.ids
        if self._vocabulary is not None:
            ids = known_ids(ids, self.model.get_input_embeddings().num_embeddings)
        given: dict[str, Any] = {"past_key_values": call.cache}
        if "logits_to_keep" in self._takes and call.scored is not None:
            given["logits_to_keep"] = call.scored
        if self._position_name is not None:
            given[self._position_name] = call.positions
        mask = None
        if self._placed:
            mask = additive(call.visible, self.model.dtype)[:, None]
            mask = layer_masks(self._windows, mask, call.positions, call.key_positions)
        if not self.cross_attends:
            return given | {"input_ids": ids, "attention_mask": mask}
        given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return given | self._encoder_inputs(call)

    def _encoder_inputs(self, call: ForwardBatch) -> dict[str, Any]:
        """The encoder's states and their mask, and a cache with cross-attention where known.

        Where keys and values are cached the states are not read, but must be there: some families
        skip cross-attention without them.
        """
        encoded = call.encoded
        if encoded is None:
            keys = call.sources[0][0]
            encoded = keys.new_zeros(1).expand(len(keys), keys.shape[2], self._encoder_width)
        given: dict[str, Any] = {
            "encoder_outputs": EncoderOutput(last_hidden_state=encoded),
            "past_key_values": EncoderDecoderCache(call.cache, filled(call.sources)),
        }
        if self.masks_sources and call.source_mask is not None:
            given["attention_mask"] = call.source_mask.long()
        return given


def filled(keys_values: Sequence[KeysValues]) -> DynamicCache:
    """A cache that holds these, a pair [B, heads, C, head_dim] a layer."""
    cache = DynamicCache()
    for keys, values in keys_values:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible, the least number elsewhere. Shapes: [...] bool -> [...]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def known_ids(ids: Tensor, rows: int) -> Tensor:
    """The tokens as an embedding of so many rows can be fed them: those that it lacks as its last.

    Whatever a drafter is fed, outputs stay exact.
    """
    return ids.clamp(max=rows - 1)


def fit_scores(logits: Tensor, vocabulary: int) -> Tensor:
    """Scores of so many tokens: a drafter's for a target whose embedding is padded otherwise.

    Tokens that the target lacks are cut; those that the drafter lacks score minus infinity, so that
    they are never drafted. Shapes: [..., own] -> [..., V].
    """
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return F.pad(logits, (0, missing), value=-torch.inf)


def version_of(weight: Tensor) -> tuple[int, int]:
    """Tells whether a weight has changed: its address, and how often it was written to."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class DraftableHead:
    """An output projection of the tokens that are drafted; others have no scores of their own."""

    def __init__(self, module: nn.Linear, draftable: Tensor) -> None:
        self.module, self._draftable = module, draftable
        self._known: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the rows again where the weights have changed; before every call."""
        now = version_of(self.module.weight)
        if now != self._known:
            self._known, self._rows = now, self.module.weight.detach()[self._draftable]

    def __call__(self, hidden: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        scores = F.linear(hidden, self._rows, None if bias is None else bias[self._draftable])
        every = scores.new_zeros(*scores.shape[:-1], len(weight))
        return every.index_copy_(-1, self._draftable, scores)

    def drafted(self, logits: Tensor) -> Tensor:
        """Logits with `UNDRAFTED` at all tokens but those that are drafted. [..., V]."""
        every = torch.full_like(logits, UNDRAFTED)
        few = logits.index_select(-1, self._draftable)
        return every.index_copy_(-1, self._draftable, few)


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


def _keeping(kept: dict[int, Tensor], number: int) -> Callable[..., None]:
    """A hook that keeps what a layer puts out, by its number; -1: after the final norm."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        kept[number] = output if isinstance(output, Tensor) else output[0]

    return keep


def _masking(attention: nn.Module, current: Current) -> Callable[..., Any]:
    """Attends under the call's mask where a decoder left it out, and under whole masks."""
    own = attention.forward

    def forward(
        hidden_states: Tensor, attention_mask: Tensor | None = None, **given: Any
    ) -> tuple[Any, ...]:
        call = current.call
        if attention_mask is not None:
            attention_mask = attention_mask.expand(-1, -1, hidden_states.shape[1], -1)
        elif call is not None and given.get("key_value_states") is None:
            attention_mask = additive(call.visible, hidden_states.dtype)[:, None]
        return own(hidden_states=hidden_states, attention_mask=attention_mask, **given)

    return forward


def _fusing(drafter: SpecDrafter, current: Current) -> Callable[[Tensor], Tensor]:
    """Embeds tokens, and adds what a Spec-Drafter makes of the states that come with them."""
    embed = drafter.embed_tokens.forward

    def forward(ids: Tensor) -> Tensor:
        embedded, call = embed(ids), current.call
        if call is None or call.states is None:
            return embedded
        added = drafter.fusion(call.states, embedded[:, : call.states.shape[1]])
        if call.has_states is not None:
            added = added.where(call.has_states, 0.0)
        return embedded + F.pad(added, (0, 0, 0, embedded.shape[1] - added.shape[1]))

    return forward
