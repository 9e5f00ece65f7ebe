"""Spec-Drafters for toy targets, with each slot convention."""

import torch

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.tiny_drafters import small_drafter

CONVENTIONS = {
    "anchored": {"slots": "anchored"},
    "anchored, previous tokens": {"slots": "anchored", "previous_token_rank": 3},
    "paper": {"slots": "paper"},
    "paper, previous tokens": {"slots": "paper", "previous_token_rank": 3},
    "paper, bidirectional": {"slots": "paper", "prefix_attention": "bidirectional"},
}


def excite(drafter: SpecDrafter) -> SpecDrafter:
    """Sets random weights large enough that all slots have different outputs."""
    torch.manual_seed(5)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.7)
    return drafter.double().eval()


def toy_drafter(**settings) -> BlockDrafter:
    return BlockDrafter(excite(small_drafter(4, 8, 3, **settings)))
