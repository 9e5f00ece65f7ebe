"""Teacher forcing: one parallel pass over known outputs, without a KV cache.

Row i of an output is what decoding would have seen there, because a causal decoder does not look
ahead. Batches are padded on the right, so positions are those of decoding. The whole model's
`forward` computes; only rows of the output enter its output projection, as a prompt's rows times
the vocabulary would be waste.
"""

from __future__ import annotations

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

from drafttrain.decoding.engine.architectures import device_of, encoder_width, unwrapped
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.forward import EncoderOutput
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.sampling import exact_enough
from drafttrain.decoding.types import Source
from drafttrain.models.draftable import UNDRAFTED, draftable_tokens

Given = Source | Sequence[int]
"""What an output was made from: a text's or prompt's tokens, or a source, whose `encoded` is read
instead of its inputs where it holds that."""


@dataclass(frozen=True)
class TeacherForced:
    """What a model computes for one known output y_1..y_L; row i - 1 belongs to y_i."""

    logits: Tensor
    """[L, V] row i - 1 judges y_i: it was computed from y_1..y_{i-1}; float32 at least."""
    hidden: Tensor
    """[L, D] last hidden state at y_i, after it was fed (and after the final norm)."""
    before: Tensor
    """[L, D] the hidden state that row i - 1 of the logits was computed from."""


@torch.inference_mode()
def teacher_force(
    model: PreTrainedModel, sources: Sequence[Given], targets: Sequence[Sequence[int]]
) -> list[TeacherForced]:
    """Logits and hidden states of each output, given its source (or prompt).

    The decoder starts from decoder_start_token_id, or from the whole prompt where the model is
    decoder-only, or as a source says. The last token is fed too: it needs a position. float16 and
    bfloat16 logits are returned as float32; tokens that a drafter does not draft have `UNDRAFTED`.
    Shapes: sources B x [S_b], targets B x [L_b]. Raises ValueError for an empty text.
    """
    hidden, logits = _forward(model, sources, targets, scored=True)
    drafted = draftable_tokens(model.config, model.get_output_embeddings().out_features)
    if drafted is not None:
        drafted = drafted.to(logits.device)
        few = torch.full_like(logits, UNDRAFTED)
        logits = few.index_copy_(-1, drafted, logits.index_select(-1, drafted))
    by_output = logits.split([len(target) for target in targets])
    return [
        TeacherForced(exact_enough(own), rows[1:], rows[:-1])
        for own, rows in zip(by_output, hidden, strict=True)
    ]


@torch.inference_mode()
def teacher_forced_states(
    model: PreTrainedModel, sources: Sequence[Given], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The hidden states of `teacher_force` alone, without paying for logits. B x [L_b, D]."""
    return [rows[1:] for rows in _forward(model, sources, targets)[0]]


@torch.no_grad()
def states_before(
    model: PreTrainedModel, sources: Sequence[Given], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """`TeacherForced.before` of `teacher_force`: the state each row of logits is computed from.

    Without gradient, but usable where there is one. Shapes and errors: as there -> B x [L_b, D].
    """
    return [rows[:-1] for rows in _forward(model, sources, targets)[0]]


def _forward(
    model: PreTrainedModel,
    given: Sequence[Given],
    targets: Sequence[Sequence[int]],
    scored: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """One pass. Hidden states [L_b + 1, D] at the token before each output and at its own tokens,
    and the logits of all outputs one after another [sum of L_b, V], none unless `scored`."""
    sources = [one if isinstance(one, Source) else make_source(one, model) for one in given]
    for index, source in enumerate(sources):
        if source.encoded is None and source.is_text and len(source.input_ids) == 0:
            raise ValueError(f"source {index} of the batch holds no tokens; leave it out")
    starts = [len(source.prefix) - 1 for source in sources]
    fed = [
        torch.cat([source.prefix, source.prefix.new_tensor(target)])
        for source, target in zip(sources, targets, strict=True)
    ]
    pad = model.config.get_text_config(decoder=True).to_dict().get("pad_token_id")
    ids = pad_sequence(fed, batch_first=True, padding_value=pad or 0)
    wanted = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    for row, (start, target) in enumerate(zip(starts, targets, strict=True)):
        wanted[row, start : start + len(target)] = scored
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs = {"decoder_input_ids": ids} | _encoder_inputs(model, sources)
    inner, kept, cut = unwrapped(model), [], []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        kept.append(output[0])

    def choose(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        cut.append(True)
        return (arguments[0][wanted][None],)

    with ExitStack() as hooks:
        hooks.callback(inner.get_decoder().register_forward_hook(keep).remove)
        hooks.callback(inner.get_output_embeddings().register_forward_pre_hook(choose).remove)
        logits = model(**inputs, use_cache=False).logits
    [hidden] = kept
    logits = logits[0] if cut else logits[wanted]
    states = [
        rows[start : start + len(target) + 1]
        for rows, start, target in zip(hidden, starts, targets, strict=True)
    ]
    return states, logits


def _encoder_inputs(model: PreTrainedModel, sources: Sequence[Source]) -> dict[str, Any]:
    """The encoder's output [B, S, D], and its mask unless all sources are of one length."""
    given = [source.encoded for source in sources]
    if any(states is None for states in given):
        given = Encoder(model)(sources)
    given = [states.to(device_of(model), model.dtype) for states in given]
    states = pad_sequence(given, batch_first=True)
    lengths = [len(own) for own in given]
    if min(lengths) == max(lengths):
        return {"encoder_outputs": EncoderOutput(last_hidden_state=states)}
    ends = torch.tensor(lengths, device=states.device)[:, None]
    mask = (torch.arange(max(lengths), device=states.device) < ends).long()
    return {"encoder_outputs": EncoderOutput(last_hidden_state=states), "attention_mask": mask}


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of last hidden states by the output projection alone, float32 at least.

    Shapes: [..., D] -> [..., V]. Raises ValueError as `check_projection`.
    """
    return exact_enough(_projected(model, hidden.to(model.dtype), check_projection(model)))


def check_projection(model: PreTrainedModel) -> float:
    """`projection_scale`. Raises ValueError for models whose logits are computed otherwise."""
    scale = projection_scale(model)
    if scale is None:
        raise ValueError(
            f"the logits of a {model.config.model_type!r} model are more than its output "
            "projection of the last hidden state; use another kind of drafter"
        )
    return scale


def _projected(model: PreTrainedModel, hidden: Tensor, scale: float) -> Tensor:
    logits = model.get_output_embeddings()(hidden if scale == 1.0 else hidden * scale)
    bias = getattr(model, "final_logits_bias", None)
    return logits if bias is None else logits + bias


_SCALES: WeakKeyDictionary[PreTrainedModel, float | None] = WeakKeyDictionary()


def projection_scale(model: PreTrainedModel) -> float | None:
    """By what last hidden states are multiplied before the output projection, with nothing after
    it but a constant bias; None: logits are computed otherwise (soft caps, a replaced forward).

    Tried once on three tokens: 1, or T5's d_model^-0.5.
    """
    if model not in _SCALES:
        _SCALES[model] = _try_projection(model)
    return _SCALES[model]


@torch.inference_mode()
def _try_projection(model: PreTrainedModel) -> float | None:
    size = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(3, device=device_of(model))[None] + size // 2) % size
    was_training = model.training
    model.eval()
    try:
        if model.config.is_encoder_decoder:
            width = encoder_width(unwrapped(model))
            encoded = torch.linspace(-1, 1, 4 * width, dtype=model.dtype, device=device_of(model))
            encoded = encoded.view(1, 4, width)
            output = model(decoder_input_ids=ids, encoder_outputs=BaseModelOutput(encoded))
            hidden = model.get_decoder()(input_ids=ids, encoder_hidden_states=encoded)[0]
        else:
            output, hidden = model(input_ids=ids), model.get_decoder()(input_ids=ids)[0]
    finally:
        model.train(was_training)
    logits = output.logits.float()
    for scale in (1.0, model.config.get_text_config(decoder=True).hidden_size ** -0.5):
        found = _projected(model, hidden, scale).float()
        if torch.allclose(found, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().amax())):
            return scale
    return None
