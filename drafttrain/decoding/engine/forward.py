"""Forward calls of a Transformers model on batches of chains of any lengths and draft trees.

The model's whole `forward` computes, with its scales, soft caps, adapters and hooks. It gets a
cache whose layers write to the columns of the call (`cache.py`), an additive mask and explicit
positions. Methods are replaced and hooks registered for the time of a call only.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LEDForConditionalGeneration,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import (
    attention_windows,
    device_of,
    encoder_width,
    layer_masks,
    unwrapped,
)
from drafttrain.decoding.engine.cache import cached_tensors
from drafttrain.decoding.engine.positions import Replacement, positions_inside, replacing
from drafttrain.decoding.sampling import at_least_float32
from drafttrain.models.draftable import mask_undrafted

ARBITRARY_MASKS = ("sdpa", "eager")
"""Attention implementations that support arbitrary masks."""


class EncoderOutput(BaseModelOutput):
    """Encoder output with the extra fields that some families read, all None."""

    attention_mask = router_logits = None


@dataclass
class ForwardBatch:
    """Input of one forward call: N new tokens of each of B sequences, padded."""

    ids: Tensor
    """[B, N]."""
    positions: Tensor
    """[B, N]."""
    visible: Tensor
    """[B, N, C] bool: which of the C columns of the call a token attends to, its own included."""
    cache: Cache | None
    key_positions: Tensor | None = None
    """[B, C] positions of the columns, for models whose masks or biases depend on distances."""
    scored: Tensor | None = None
    """[R] indices in 0..N-1, ascending, to compute logits for; None: all."""
    sources: Sequence[Tensor] = ()
    """Cached cross-attention, keys and values of each layer in turn [B, heads, S, head_dim]; empty
    in a first call."""
    source_mask: Tensor | None = None
    """[B, S] bool, true for source tokens, false for padding; None: no padding."""
    encoded: Tensor | None = None
    """[B, S, D] encoder states, in the first call of sequences; else None."""
    embedded: Tensor | None = None
    """[B, N, D] input embeddings to use instead of those of the tokens."""
    layers: Sequence[int] = ()
    """Decoder layers whose outputs are returned."""


class BatchOutput(NamedTuple):
    """Output of one forward call."""

    logits: Tensor
    """[B, R, V] of the tokens in `ForwardBatch.scored`."""
    hidden: Tensor
    """[B, N, D] last hidden states, after the final norm."""
    layers: Mapping[int, Tensor] = {}
    """[B, N, D] of each layer in `ForwardBatch.layers`."""
    sources: Sequence[Tensor] = ()
    """Cross-attention that a first call computed, as in `ForwardBatch.sources`."""


class Body(Protocol):
    """The interface through which the engine calls a decoder."""

    device: torch.device
    modules: Sequence[nn.Module]
    """All modules with weights that it uses."""
    needs_key_positions: bool
    """Whether it reads `ForwardBatch.key_positions`."""
    cross_attends: bool
    """Whether it has cross-attention to a source."""
    masks_sources: bool
    """Whether sources can be padded; else all sources of a call must have the same length."""

    def prepared(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        """Prepares the model for `compute` with outputs of these layers, and restores it after."""

    def compute(self, call: ForwardBatch) -> BatchOutput:
        """Runs one call, inside `prepared`; torch.compile can trace it."""


class TransformersBody:
    """A Transformers model, possibly wrapped (by peft, say), called through its `forward`."""

    def __init__(
        self,
        model: PreTrainedModel,
        draftable: Tensor | None = None,
        vocabulary: int | None = None,
        explicit_masks: bool = True,
    ) -> None:
        """draftable [N]: the tokens to compute logits for; None: all. vocabulary: V of the logits;
        None: the model's. explicit_masks: pass masks and positions; else the model computes its
        own, which allows one chain per call."""
        self.model, self.device, self.modules = model, device_of(model), [model]
        inner = unwrapped(model)
        self.cross_attends = bool(model.config.is_encoder_decoder)
        self._encoder_width = encoder_width(inner) if self.cross_attends else 0
        self._takes = inspect.signature(type(inner).forward).parameters
        self._decoder = inner.get_decoder()
        self._explicit_masks, self._vocabulary = explicit_masks, vocabulary
        name = "decoder_position_ids" if self.cross_attends else "position_ids"
        decoder_takes = inspect.signature(type(self._decoder).forward).parameters
        has_kwargs = any(one.kind is one.VAR_KEYWORD for one in self._takes.values())
        takes_positions = name in self._takes or (has_kwargs and "position_ids" in decoder_takes)
        self._position_name = name if explicit_masks and takes_positions else None
        self.call: ForwardBatch | None = None
        """The call in progress, which replaced methods read."""
        self._replaced: list[Replacement] = []
        if explicit_masks and not takes_positions:
            self._replaced += positions_inside(self._decoder, self)
        if explicit_masks and isinstance(inner, LEDForConditionalGeneration):
            for layer in decoder_layers(self._decoder):
                for attention in (layer.self_attn, layer.encoder_attn):
                    self._replaced.append((attention, "forward", _with_mask(attention, self)))
        self._windows = attention_windows(model.config)
        windowed = any(window is not None for window in self._windows.values())
        biased = any(name == "compute_bias" for _, name, _ in self._replaced)
        self.needs_key_positions = explicit_masks and (windowed or biased)
        is_text = inner.main_input_name == "input_ids"  # an audio mask covers frames, not states
        self.masks_sources = is_text and "encoder_attention_mask" in decoder_takes
        self._head = None
        if draftable is not None:
            self._head = DraftableHead(inner.get_output_embeddings(), draftable)
            self._replaced.append((self._head.module, "forward", self._head))
        self._captured: dict[int, Tensor] = {}
        self._hooks = {-1: _capture_hook(self._captured, -1)}

    @contextmanager
    def prepared(self, layers: Sequence[int]) -> Iterator[None]:
        """Replaces methods, hooks layers and selects an attention that takes masks; undoes all."""
        attention = self.model.config._attn_implementation
        if self._head is not None:
            self._head.refresh()
        with ExitStack() as stack:
            if self._replaced:
                stack.enter_context(replacing(self._replaced))
            for number in {-1, *layers}:
                module = self._decoder if number == -1 else decoder_layers(self._decoder)[number]
                hook = self._hooks.setdefault(number, _capture_hook(self._captured, number))
                stack.callback(module.register_forward_hook(hook).remove)
            if self._explicit_masks and attention not in ARBITRARY_MASKS:
                stack.callback(self.model.set_attn_implementation, attention)
                self.model.set_attn_implementation("sdpa")
            yield

    def compute(self, call: ForwardBatch) -> BatchOutput:
        """Runs one call, inside `prepared`."""
        self.call = call
        inputs = self._inputs(call)
        output = self.model(**inputs, use_cache=True)
        logits = output.logits
        if "logits_to_keep" not in inputs and call.scored is not None:
            logits = logits[:, call.scored]
        logits = at_least_float32(logits)
        if self._head is not None:
            logits = mask_undrafted(logits, self._head.draftable)
        if self._vocabulary is not None:
            logits = fit_scores(logits, self._vocabulary)
        sources = []
        if call.encoded is not None:
            sources = cached_tensors(inputs["past_key_values"].cross_attention_cache)
        layers = {number: self._captured[number] for number in (-1, *call.layers)}
        self._captured.clear()
        self.call = None
        return BatchOutput(logits, layers.pop(-1), layers, sources)

    def run_decoder(self, call: ForwardBatch) -> Tensor:
        """Computes the last hidden states [B, N, D] of an encoder-decoder model, with gradients.

        call.encoded holds the encoder states [B, S, D]; call.cache may be None.
        """
        inputs: dict[str, Any] = {
            "input_ids": call.ids,
            "attention_mask": self._masks(call),
            "encoder_hidden_states": call.encoded,
            "past_key_values": call.cache,
            "use_cache": call.cache is not None,
        }
        if self._position_name is not None:
            inputs["position_ids"] = call.positions
        if self.masks_sources and call.source_mask is not None:
            # an additive mask is used as it is, without a device synchronisation
            visible = call.source_mask.bool()[:, None, None]
            inputs["encoder_attention_mask"] = additive(visible, self.model.dtype)
        self.call = call
        with replacing(self._replaced):
            hidden = self._decoder(**inputs)[0]
        self.call = None
        return hidden

    def _masks(self, call: ForwardBatch) -> Tensor | dict[str, Tensor]:
        mask = additive(call.visible, self.model.dtype)[:, None]
        return layer_masks(self._windows, mask, call.positions, call.key_positions)

    def _inputs(self, call: ForwardBatch) -> dict[str, Any]:
        ids = call.ids
        if self._vocabulary is not None:  # a drafter reads unknown tokens as its last one
            ids = ids.clamp(max=self.model.get_input_embeddings().num_embeddings - 1)
        inputs: dict[str, Any] = {"past_key_values": call.cache}
        if "logits_to_keep" in self._takes and call.scored is not None:
            inputs["logits_to_keep"] = call.scored
        if self._position_name is not None:
            inputs[self._position_name] = call.positions
        mask = self._masks(call) if self._explicit_masks else None
        if not self.cross_attends:
            return inputs | {"input_ids": ids, "attention_mask": mask}
        encoded = call.encoded
        if encoded is None:  # not read, but some families skip cross-attention without states
            keys = call.sources[0]
            encoded = keys.new_zeros(1).expand(len(keys), keys.shape[2], self._encoder_width)
        if self.masks_sources and call.source_mask is not None:
            inputs["attention_mask"] = call.source_mask.long()
        return inputs | {
            "decoder_input_ids": ids,
            "decoder_attention_mask": mask,
            "encoder_outputs": EncoderOutput(last_hidden_state=encoded),
            "past_key_values": EncoderDecoderCache(call.cache, filled_cache(call.sources)),
        }


def filled_cache(keys_values: Sequence[Tensor]) -> DynamicCache:
    """Returns a cache of keys and values of each layer in turn, [B, heads, C, head_dim]."""
    cache = DynamicCache()
    for keys, values in zip(keys_values[::2], keys_values[1::2], strict=True):
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an additive mask: 0 if visible, else the dtype's minimum. [...] bool -> [...]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)


def fit_scores(logits: Tensor, vocabulary: int) -> Tensor:
    """Resizes a drafter's logits to the target's vocabulary, which may be padded differently.

    Tokens that the target lacks are cut; those that the drafter lacks get minus infinity, so that
    they are never drafted. Shapes: [..., drafter's V] -> [..., vocabulary].
    """
    missing = vocabulary - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocabulary]
    return F.pad(logits, (0, missing), value=-torch.inf)


def version_of(weight: Tensor) -> tuple[int, int]:
    """Returns a weight's address and write count, which differ after any change."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


class DraftableHead:
    """Output projection that computes logits of draftable tokens only."""

    def __init__(self, module: nn.Linear, draftable: Tensor) -> None:
        self.module, self.draftable = module, draftable
        self._version: tuple[int, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Copies the weight rows again if the weights have changed; called before every call."""
        version = version_of(self.module.weight)
        if version != self._version:
            self._version, self._rows = version, self.module.weight.detach()[self.draftable]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns logits, 0 for tokens that are not draftable. Shapes: [..., D] -> [..., V]."""
        weight, bias = self.module.weight, self.module.bias
        scores = F.linear(hidden, self._rows, None if bias is None else bias[self.draftable])
        logits = scores.new_zeros(*scores.shape[:-1], len(weight))
        return logits.index_copy_(-1, self.draftable, scores)


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Returns the layers of a decoder in order. Raises ValueError if they are not found."""
    for name in ("layers", "block", "h"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(
        f"the layers of a {type(decoder).__name__} were not found; use a drafter that reads only "
        "the last hidden state"
    )


def _capture_hook(captured: dict[int, Tensor], number: int) -> Callable[..., None]:
    """Returns a hook that stores a layer's output; number -1: the decoder's, after the norm."""

    def capture(module: nn.Module, inputs: Any, output: Any) -> None:
        captured[number] = output if isinstance(output, Tensor) else output[0]

    return capture


def _with_mask(attention: nn.Module, body: TransformersBody) -> Callable[..., Any]:
    """Returns an attention's `forward` that adds a dropped mask and expands a given one.

    LED's decoder drops the mask of a single token and does not expand the source's mask.
    """
    original = attention.forward

    def forward(
        hidden_states: Tensor, attention_mask: Tensor | None = None, **arguments: Any
    ) -> tuple[Any, ...]:
        if attention_mask is not None:
            attention_mask = attention_mask.expand(-1, -1, hidden_states.shape[1], -1)
        elif arguments.get("key_value_states") is None:
            attention_mask = additive(body.call.visible, hidden_states.dtype)[:, None]
        return original(hidden_states=hidden_states, attention_mask=attention_mask, **arguments)

    return forward
