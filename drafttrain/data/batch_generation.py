"""The target's outputs for a batch of inputs, finished rows leaving the batch.

Transformers' `generate` prepares everything (encoder, cache, logits processors, stopping criteria).
Beam search is its own; greedy decoding and sampling run the loop below, because `generate` carries
finished rows along to the end of a batch. Sampling turns a row's own uniform numbers into tokens,
so that a row's output does not depend on its batch, its shard or the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

LEAVE_SHARE = 0.25
"""Finished rows leave once they are this share of the batch; a gather copies the whole cache."""


def decodes_alone(config: GenerationConfig) -> bool:
    """Whether logits processors look at the sources themselves, so that padding would count."""
    penalty, ngram = config.encoder_repetition_penalty, config.encoder_no_repeat_ngram_size
    return bool(ngram) or penalty not in (None, 1.0)


@torch.inference_mode()
def generate_batch(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    settings: dict[str, Any],
    uniforms: Tensor | None = None,
) -> list[list[int] | None]:
    """Tokens generated for each source after the decoder start token, EOS included, no padding.

    settings: keyword arguments of `generate`. None stands for a row whose scores were not finite.
    Shapes: uniforms [B, max_new_tokens] in [0, 1), where settings say do_sample.
    """
    rows = [torch.tensor(source) for source in sources]
    pad = model.config.pad_token_id or 0  # masked: any token will do
    inputs = pad_sequence(rows, batch_first=True, padding_value=pad).to(model.device)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(model.device)
    if settings["num_beams"] > 1:
        sequences = model.generate(inputs, attention_mask=mask, **settings)
        return trim(sequences, model)
    return model.generate(
        inputs, attention_mask=mask, custom_generate=_decode, uniforms=uniforms, **settings
    )


def trim(sequences: Tensor, model: PreTrainedModel) -> list[list[int]]:
    """Drops the decoder start token and all that follows the first EOS after it.

    What `generate` appends to a finished row is padding, whichever token that is; a row without
    EOS was cut at the maximal length and has none. Shapes: [B, T].
    """
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    trimmed = []
    for tokens in sequences[:, 1:].tolist():
        last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
        trimmed.append(tokens[: last + 1])
    return trimmed


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    uniforms: Tensor | None = None,
    **prepared: Any,
) -> list[list[int] | None]:
    """Greedy decoding or sampling, called by `generate` (custom_generate) with all prepared.

    A parameter named here is taken out of what `generate` itself sees, so the mask is not one.
    """
    tokens, cache, mask = input_ids, prepared["past_key_values"], prepared["attention_mask"]
    hidden = prepared["encoder_outputs"].last_hidden_state
    prefix = fed = tokens.shape[1]
    rows = torch.arange(len(tokens), device=tokens.device)
    going = torch.ones_like(rows, dtype=torch.bool)
    outputs: list[list[int] | None] = [None] * len(rows)
    while True:
        logits = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            attention_mask=mask,
            decoder_input_ids=tokens[:, -fed:],
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
        fed = 1
        scores = logits_processor(tokens, logits.float())
        finite = scores.amax(dim=-1).isfinite()
        step = tokens.shape[1] - prefix
        drawn = None if uniforms is None else uniforms[rows.cpu(), step].to(scores.device)
        tokens = torch.cat([tokens, choose(scores, drawn)[:, None]], dim=-1)
        ended = going & stopping_criteria(tokens, scores)
        for row in (ended & finite).nonzero().flatten().tolist():
            outputs[rows[row]] = tokens[row, prefix:].tolist()
        going &= finite & ~ended
        left = int(going.sum())
        if left == 0:
            return outputs
        if left <= (1 - LEAVE_SHARE) * len(rows):
            keep = going.nonzero().flatten()
            cache.batch_select_indices(keep)
            rows, tokens, going = rows[keep], tokens[keep], going[keep]
            hidden, mask = hidden[keep], mask[keep]


def choose(scores: Tensor, uniforms: Tensor | None) -> Tensor:
    """The most likely token, or the token at a uniform number's place in the distribution.

    Shapes: scores [R, V], uniforms [R] in [0, 1) or None -> [R].
    """
    if uniforms is None:
        return scores.argmax(dim=-1)
    mass = scores.double().softmax(dim=-1).cumsum(dim=-1)
    places = uniforms[:, None] * mass[:, -1:]
    tokens = torch.searchsorted(mass, places, right=True)
    return tokens.clamp(max=scores.shape[-1] - 1).squeeze(-1)
