"""An export is done when everything in it has been loaded again and says the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from drafttrain.decoding.drafters.spec_drafter import block_states
from drafttrain.export.parts import Parts
from drafttrain.export.policy import HEAD, POLICY, read_policy
from drafttrain.models.acceptance_head import AcceptanceHead, load_heads
from drafttrain.models.drafters import load_drafter
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.spec_drafter import SpecDrafter

TOKENS = 8
"""Length of the input on which logits are compared; every model takes as many."""


def verify(folder: Path, parts: Parts) -> None:
    """Reload drafter, tokenizer, head and policy from a folder, and compare with the originals.

    Weights by hash, logits and predictions number by number: the same weights in the same type
    compute the same on the same machine. Raises ValueError naming what differs.
    """
    drafter = load_drafter(folder, AutoConfig.from_pretrained(folder))
    if hash_weights(drafter) != hash_weights(parts.drafter):
        _fail("the drafter's weights")
    if not torch.equal(some_logits(drafter), some_logits(parts.drafter)):
        _fail("the drafter's logits")
    if drafter.can_generate():
        written = drafter.generation_config
        if (
            written.num_assistant_tokens != parts.assisted.tokens
            or written.assistant_confidence_threshold != parts.assisted.confidence
        ):
            _fail("generation_config.json")
    if hash_tokenizer(AutoTokenizer.from_pretrained(folder)) != hash_tokenizer(parts.tokenizer):
        _fail("the tokenizer")
    if parts.head is not None:
        [head] = load_heads(folder / HEAD).values()
        if not torch.equal(some_predictions(head), some_predictions(parts.head)):
            _fail("the acceptance head")
    if read_policy(folder / POLICY) != parts.policy:
        _fail(POLICY)


@torch.inference_mode()
def some_logits(drafter: PreTrainedModel) -> Tensor:
    """Logits on tokens spread over the vocabulary, as source and as output. [T, V]"""
    size = drafter.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(TOKENS) * (size - 1) // TOKENS + 1
    if isinstance(drafter, SpecDrafter):
        states, previous = block_states(drafter, ids, ids, range(TOKENS), drafter.config.k)
        return drafter.logits(states, previous).flatten(0, 1)
    if drafter.config.is_encoder_decoder:
        return drafter(input_ids=ids[None], decoder_input_ids=ids[None]).logits[0]
    return drafter(input_ids=ids[None]).logits[0]


@torch.inference_mode()
def some_predictions(head: AcceptanceHead) -> Tensor:
    """Predictions on states of several sizes. [T]"""
    width = head.config.hidden_size
    rows = torch.linspace(-3.0, 3.0, TOKENS * width, device=head.out.weight.device)
    return head.acceptance(rows.view(TOKENS, width))


def _fail(what: str) -> None:
    raise ValueError(
        f"{what} changed while being written; nothing was exported. Load and save the drafter "
        "once with save_pretrained, and export that"
    )
