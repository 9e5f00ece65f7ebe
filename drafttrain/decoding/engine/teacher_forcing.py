"""Teacher forcing: one parallel pass over known outputs, without a KV cache.

A causal decoder does not look ahead, so each row equals the one that decoding would have computed.
Batches are padded on the right, so positions equal those of decoding too. The model's own `forward`
computes, but the output projection is applied only to rows of the outputs, not to prompts.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import (
    decoder_settings,
    device_of,
    encoder_width,
    unwrapped,
)
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.forward import EncoderOutput
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.sampling import at_least_float32
from drafttrain.decoding.types import Source
from drafttrain.models.draftable import draftable_tokens, mask_undrafted

SourceLike = Source | Sequence[int]
"""The token ids of a text or prompt, or a source, whose encoder states (`Source.encoded`) are used
if it has them."""


@dataclass(frozen=True)
class TeacherForced:
    """Logits of one known output y_1..y_L and their hidden states; row i - 1 belongs to y_i."""

    logits: Tensor
    """[L, V] row i - 1 predicts y_i: it was computed from y_1..y_{i-1}; float32 at least."""
    before: Tensor
    """[L, D] last hidden state that row i - 1 of the logits was computed from."""


@torch.inference_mode()
def teacher_force(
    model: PreTrainedModel, sources: Sequence[SourceLike], targets: Sequence[Sequence[int]]
) -> list[TeacherForced]:
    """Returns the logits of each output, given its source or prompt.

    The decoder starts from `Source.prefix` if a source is given, else from decoder_start_token_id,
    or from the prompt of a decoder-only model. The last token is an input too and needs a position.
    float16 and bfloat16 logits are returned as float32; tokens that a drafter cannot draft get
    `UNDRAFTED`. Shapes: sources B x [S_b], targets B x [L_b]. Raises ValueError for an empty text.
    """
    hidden, logits = _forward(model, sources, targets, scored=True)
    draftable = draftable_tokens(model.config, model.get_output_embeddings().out_features)
    if draftable is not None:
        logits = mask_undrafted(logits, draftable.to(logits.device))
    by_output = logits.split([len(target) for target in targets])
    return [
        TeacherForced(at_least_float32(own), rows[:-1])
        for own, rows in zip(by_output, hidden, strict=True)
    ]


@torch.no_grad()
def teacher_forced_states(
    model: PreTrainedModel, sources: Sequence[SourceLike], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Returns the last hidden states (after the final norm) at the token before each output and at
    its own tokens, without computing logits: B x [L_b + 1, D].

    They have no gradient, but can be used with autograd. Errors as in `teacher_force`.
    """
    return _forward(model, sources, targets)[0]


def _forward(
    model: PreTrainedModel,
    inputs: Sequence[SourceLike],
    targets: Sequence[Sequence[int]],
    scored: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Returns the states of `teacher_forced_states` and the logits of all outputs, concatenated:
    [sum of L_b, V], or no rows unless `scored`."""
    sources = [one if isinstance(one, Source) else make_source(one, model) for one in inputs]
    for index, source in enumerate(sources):
        if source.encoded is None and source.is_text and len(source.input_ids) == 0:
            raise ValueError(f"source {index} of the batch has no tokens; leave it out")
    starts = [len(source.prefix) - 1 for source in sources]
    tokens = [
        torch.cat([source.prefix, source.prefix.new_tensor(target)])
        for source, target in zip(sources, targets, strict=True)
    ]
    pad = decoder_settings(model.config).get("pad_token_id") or 0
    ids = pad_sequence(tokens, batch_first=True, padding_value=pad)
    # indices, since selecting by a mask would synchronise the device
    columns = [
        row * ids.shape[1] + start + index
        for row, (start, target) in enumerate(zip(starts, targets, strict=True))
        for index in range(len(target) if scored else 0)
    ]
    scored_rows = torch.tensor(columns, dtype=torch.long).to(ids.device, non_blocking=True)
    arguments: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        arguments = {"decoder_input_ids": ids} | _encoder_inputs(model, sources)
    inner, captured, selected = unwrapped(model), [], []

    def capture(module: nn.Module, inputs: Any, output: Any) -> None:
        captured.append(output[0])

    def select(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        selected.append(True)
        return (inputs[0].flatten(0, 1)[scored_rows][None],)

    with ExitStack() as hooks:
        hooks.callback(inner.get_decoder().register_forward_hook(capture).remove)
        hooks.callback(inner.get_output_embeddings().register_forward_pre_hook(select).remove)
        logits = model(**arguments, use_cache=False).logits
    [hidden] = captured
    # the hook does not run if a model uses the projection's weight without calling the module
    logits = logits[0] if selected else logits.flatten(0, 1)[scored_rows]
    states = [
        rows[start : start + len(target) + 1]
        for rows, start, target in zip(hidden, starts, targets, strict=True)
    ]
    return states, logits


def _encoder_inputs(model: PreTrainedModel, sources: Sequence[Source]) -> dict[str, Any]:
    """Returns encoder states [B, S, D] and, unless all sources have one length, their mask."""
    encoded = [one.to(device_of(model), model.dtype) for one in Encoder(model)(sources)]
    states = pad_sequence(encoded, batch_first=True)
    inputs: dict[str, Any] = {"encoder_outputs": EncoderOutput(last_hidden_state=states)}
    lengths = list(map(len, encoded))
    if min(lengths) < max(lengths):
        ends = torch.tensor(lengths, device=states.device)[:, None]
        inputs["attention_mask"] = (torch.arange(max(lengths), device=states.device) < ends).long()
    return inputs


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Computes logits from last hidden states, float32 at least. Shapes: [..., D] -> [..., V].

    Raises ValueError as `check_projection` does.
    """
    return at_least_float32(_projected(model, hidden.to(model.dtype), check_projection(model)))


def check_projection(model: PreTrainedModel) -> float:
    """Returns `projection_scale`. Raises ValueError for models that compute logits otherwise."""
    scale = projection_scale(model)
    if scale is None:
        raise ValueError(
            f"the logits of a {model.config.model_type!r} model are not just its output "
            "projection of the last hidden state; use another kind of drafter"
        )
    return scale


def _projected(model: PreTrainedModel, hidden: Tensor, scale: float) -> Tensor:
    logits = model.get_output_embeddings()(hidden if scale == 1.0 else hidden * scale)
    bias = getattr(model, "final_logits_bias", None)
    return logits if bias is None else logits + bias


_SCALES: WeakKeyDictionary[PreTrainedModel, float | None] = WeakKeyDictionary()


def projection_scale(model: PreTrainedModel) -> float | None:
    """Returns the factor on last hidden states before the output projection: 1, or d_model^-0.5.

    After the projection only a constant bias may be added; None: logits are computed otherwise
    (soft caps, a replaced forward). Each model is run once on three tokens to find it.
    """
    if model not in _SCALES:
        _SCALES[model] = _try_projection(model)
    return _SCALES[model]


@torch.inference_mode()
def _try_projection(model: PreTrainedModel) -> float | None:
    if decoder_settings(model.config).get("final_logit_softcapping"):  # no effect on small logits
        return None
    size = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(3, device=device_of(model))[None] + size // 2) % size
    was_training = model.training
    model.eval()
    try:
        if model.config.is_encoder_decoder:
            encoded = torch.linspace(-1, 1, 4 * encoder_width(unwrapped(model)), dtype=model.dtype)
            encoded = encoded.view(1, 4, -1).to(ids.device)
            output = model(decoder_input_ids=ids, encoder_outputs=BaseModelOutput(encoded))
            hidden = model.get_decoder()(input_ids=ids, encoder_hidden_states=encoded)[0]
        else:
            output, hidden = model(input_ids=ids), model.get_decoder()(input_ids=ids)[0]
    finally:
        model.train(was_training)
    logits = output.logits.float()
    for scale in (1.0, model.config.get_text_config(decoder=True).hidden_size ** -0.5):
        projected = _projected(model, hidden, scale).float()
        if torch.allclose(projected, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().amax())):
            return scale
    return None
