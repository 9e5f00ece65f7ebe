"""Teacher forcing: one parallel pass over known outputs, without a KV cache.

Row i of an output is what decoding would have seen there, because a causal decoder does not look
ahead. Batches are padded on the right, so positions are those of decoding, and only rows of the
output go through the output projection: a prompt's rows times the vocabulary would be waste.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from drafttrain.decoding.engine.architectures import BART_LIKE, KNOWN
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
    drafted = None
    if type(model) in KNOWN:  # of others the engine scores all tokens
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
    device = model.device
    plain = type(model) in KNOWN
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
    states = [one.to(model.device, model.dtype) for one in encoded]
    lengths = torch.tensor([len(one) for one in states], device=model.device)
    padded = pad_sequence(states, batch_first=True)
    if len(lengths.unique()) == 1:
        return padded, None
    places = torch.arange(padded.shape[1], device=model.device)
    return padded, (places < lengths[:, None]).long()


def project(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Logits of last hidden states, for families that are known. Shapes: [..., D] -> [..., V]."""
    if type(model) is T5ForConditionalGeneration and model.config.scale_decoder_outputs:
        hidden = hidden * model.config.d_model**-0.5
    logits = model.get_output_embeddings()(hidden)
    return logits + model.final_logits_bias if isinstance(model, BART_LIKE) else logits


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
