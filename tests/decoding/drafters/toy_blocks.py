"""A Spec-Drafter for toy targets, in each of its conventions."""

from __future__ import annotations

import torch

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.models.spec_drafter.model import SpecDrafter, SpecDrafterConfig
from tests.decoding.toys import TARGET_WIDTH

CONVENTIONS = {
    "anchored": {"slots": "anchored"},
    "anchored, coupled": {"slots": "anchored", "previous_token_rank": 3},
    "own weights": {"slots": "anchored", "slot_weights": "own"},
    "own weights, coupled": {
        "slots": "anchored",
        "slot_weights": "own",
        "previous_token_rank": 3,
    },
    "causal slots": {
        "slots": "anchored",
        "slot_attention": "causal",
        "slot_weights": "own",
        "previous_token_rank": 3,
    },
    "first fed": {"slots": "anchored", "slot_attention": "causal", "feeds_first": True},
    "first fed, coupled": {
        "slots": "anchored",
        "slot_attention": "causal",
        "feeds_first": True,
        "slot_weights": "own",
        "previous_token_rank": 3,
    },
    "paper": {"slots": "paper"},
    "paper, coupled": {"slots": "paper", "previous_token_rank": 3},
    "paper, bidirectional": {"slots": "paper", "prefix_attention": "bidirectional"},
}

TOLD_STATES = {
    "states told": {"state_width": TARGET_WIDTH, "previous_token_rank": 3},
    "states and first fed": {
        "state_width": TARGET_WIDTH,
        "slot_attention": "causal",
        "feeds_first": True,
        "slot_weights": "own",
    },
}
"""Conventions of drafters that are told the target's states, which go along with targets only."""


def excite(drafter: SpecDrafter) -> SpecDrafter:
    """Random weights large enough that every slot says something else."""
    torch.manual_seed(5)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.7)
    return drafter.double().eval()


def toy_drafter(**settings) -> BlockDrafter:
    config = SpecDrafterConfig(
        vocab_size=4,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        attention_heads=2,
        ffn_dim=8,
        decoder_start_token_id=0,
        max_positions=32,
        k=3,
        **settings,
    )
    return BlockDrafter(excite(SpecDrafter(config)))
