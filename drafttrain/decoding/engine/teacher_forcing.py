"""Teacher forcing: one parallel pass over known outputs, without a KV cache.

Row i of an output is what decoding would have seen there, because a causal decoder does not look
ahead. Batches are padded on the right, so positions are those of decoding, and only rows of the
output go through the output projection: a prompt's rows times the vocabulary would be waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import device_of
from drafttrain.decoding.engine.encoding import pad_texts
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Source
from drafttrain.models.causal_drafter import draftable_tokens
from drafttrain.models.spec_drafter.model import UNDRAFTED

Given = Source | Sequence[int]
"""What an output was made from: a text's or prompt's tokens, or a source, whose `encoded` is read
instead of its inputs where it holds that."""


@dataclass(frozen=True)
class Forced:
    """What a model says along one known output y_1..y_L; row i - 1 belongs to y_i."""

    logits: Tensor
    """[L, V] row i - 1 judges y_i: it was computed from y_1..y_{i-1}; float32 at least."""
    hidden: Tensor
    """[L, D] last hidden state at y_i, after it was fed (and after the final norm)."""
    before: Tensor
    """[L, D] the hidden state that row i - 1 of the logits was computed from."""


@torch.inference_mode()
def teacher_force(
    model: PreTrainedModel, sources: Sequence[Given], targets: Sequence[Sequence[int]]
) -> list[Forced]:
    """Logits and hidden states of each output, given its source (or prompt).

    The decoder starts from decoder_start_token_id, or from the whole prompt where the model is
    decoder-only, or as a source says. The last token is fed too: it needs a position. float16 and
    bfloat16 logits are returned as float32; tokens that a drafter does not draft have `UNDRAFTED`.
    Shapes: sources B x [S_b], targets B x [L_b]. Raises ValueError for an empty text, and for
    features that have not been encoded.
    """
    lengths = [len(target) for target in targets]
    hidden, projected = _rows(model, sources, targets)
    if projected is None:
        projected = project(model, torch.cat([rows[:-1] for rows in hidden])).split(lengths)
    drafted = draftable_tokens(model.config, model.get_output_embeddings().out_features)
    return [
        Forced(_drafted_alone(_at_least_float32(logits), drafted), rows[1:], rows[:-1])
        for logits, rows in zip(projected, hidden, strict=True)
    ]


def _drafted_alone(logits: Tensor, drafted: Tensor | None) -> Tensor:
    """The logits with `UNDRAFTED` at all tokens but these; None: all are drafted."""
    if drafted is None:
        return logits
    drafted = drafted.to(logits.device)
    few = torch.full_like(logits, UNDRAFTED)
    return few.index_copy_(-1, drafted, logits.index_select(-1, drafted))


@torch.inference_mode()
def forced_states(
    model: PreTrainedModel, sources: Sequence[Given], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The hidden states of `teacher_force` alone, without paying for logits. B x [L_b, D]."""
    return [rows[1:] for rows in _rows(model, sources, targets)[0]]


@torch.no_grad()
def states_before(
    model: PreTrainedModel, sources: Sequence[Given], targets: Sequence[Sequence[int]]
) -> list[Tensor]:
    """`Forced.before` of `teacher_force` alone: what each row of logits would be computed from.

    Without gradient, but usable where there is one. Shapes and errors: as there -> B x [L_b, D].
    """
    return [rows[:-1] for rows in _rows(model, sources, targets)[0]]


def _as_sources(model: PreTrainedModel, given: Sequence[Given]) -> list[Source]:
    sources = [one if isinstance(one, Source) else make_source(one, model) for one in given]
    for index, source in enumerate(sources):
        if source.encoded is None and len(source.input_ids) == 0:
            raise ValueError(f"source {index} of the batch holds no tokens; leave it out")
    return sources


def _rows(
    model: PreTrainedModel, given: Sequence[Given], targets: Sequence[Sequence[int]]
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Hidden states [L_b + 1, D] at the token before each output and at its own tokens.

    Also the logits [L_b, V], where the whole model had to run because its output projection is
    not known to be plain; else None.
    """
    device = device_of(model)
    plain = projection_scale(model) is not None
    sources = _as_sources(model, given)
    prefixes = [source.prefix for source in sources]
    fed = [
        torch.cat([prefix, torch.tensor(target, dtype=torch.long, device=device)])
        for prefix, target in zip(prefixes, targets, strict=True)
    ]
    inputs = {"input_ids": _pad(fed, model), "use_cache": False}
    encoded = [source.encoded for source in sources if source.encoded is not None]
    if encoded and len(encoded) == len(sources):
        padded, mask = _pad_states(encoded, model)
        if plain:
            inputs |= {"encoder_hidden_states": padded}
            inputs |= {} if mask is None else {"encoder_attention_mask": mask}
        else:
            inputs["decoder_input_ids"] = inputs.pop("input_ids")
            inputs |= {"encoder_outputs": BaseModelOutput(padded), "attention_mask": mask}
    elif model.config.is_encoder_decoder:
        padded, mask = pad_texts(sources, model.config.pad_token_id, device)
        if plain:
            states = model.get_encoder()(input_ids=padded, attention_mask=mask)[0]
            inputs |= {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        else:
            inputs |= {"decoder_input_ids": inputs["input_ids"], "attention_mask": mask}
            inputs |= {"input_ids": padded}
    spans = [
        slice(len(prefix) - 1, len(tokens)) for prefix, tokens in zip(prefixes, fed, strict=True)
    ]
    if plain:
        hidden = model.get_decoder()(**inputs)[0]
        return [rows[span] for rows, span in zip(hidden, spans, strict=True)], None
    output = model(**inputs, output_hidden_states=True)
    encoder_decoder = model.config.is_encoder_decoder
    states = output.decoder_hidden_states if encoder_decoder else output.hidden_states
    return (
        [rows[span] for rows, span in zip(states[-1], spans, strict=True)],
        [rows[span][:-1] for rows, span in zip(output.logits, spans, strict=True)],
    )


def _pad(sequences: Sequence[Tensor], model: PreTrainedModel) -> Tensor:
    """[B, longest], padded on the right: nothing that counts looks there."""
    pad = model.config.get_text_config(decoder=True).to_dict().get("pad_token_id")
    return pad_sequence(list(sequences), batch_first=True, padding_value=pad or 0)


def _pad_states(encoded: Sequence[Tensor], model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """[B, S, E] and the mask [B, S] of what is there; None: all are of one length."""
    states = [one.to(device_of(model), model.dtype) for one in encoded]
    lengths = torch.tensor([len(one) for one in states], device=device_of(model))
    padded = pad_sequence(states, batch_first=True)
    if len(lengths.unique()) == 1:
        return padded, None
    places = torch.arange(padded.shape[1], device=device_of(model))
    return padded, (places < lengths[:, None]).long()


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of last hidden states by the output projection alone. Shapes: [..., D] -> [..., V].

    Raises ValueError as `check_projection`.
    """
    return _projected(model, hidden, check_projection(model))


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
            width = model.config.hidden_size
            encoded = torch.linspace(-1, 1, 4 * width, dtype=model.dtype, device=device_of(model))
            encoded = encoded.view(1, 4, width)
            output = model(decoder_input_ids=ids, encoder_outputs=BaseModelOutput(encoded))
            hidden = model.get_decoder()(input_ids=ids, encoder_hidden_states=encoded)[0]
        else:
            output, hidden = model(input_ids=ids), model.get_decoder()(input_ids=ids)[0]
    finally:
        model.train(was_training)
    logits = output.logits.float()
    for scale in (1.0, model.config.hidden_size**-0.5):
        found = _projected(model, hidden, scale).float()
        if torch.allclose(found, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().amax())):
            return scale
    return None


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
