"""Rows of packed texts equal those of each text alone."""

from __future__ import annotations

import pytest
import torch

from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.training.objectives.follow_target import text_rows
from tests.comparing import close
from tests.tiny_families import any_family

ROWS = [
    ([5, 9, 20, 7], [11, 30, 12, 8, 25, 1]),
    ([9, 20, 7, 30, 11, 6], [30, 12, 8, 25, 1]),
    ([21], [12, 8, 1]),
    ([8, 15], [1]),
]


@pytest.mark.parametrize("family", ["Gemma3Text", "Mistral", "Cohere"])
def test_logits_of_packed_texts_equal_single_texts(family: str) -> None:
    """With windows of 5 tokens in some or all layers, and with scaled logits."""
    model, wanted = any_family(family), torch.tensor([4, 8, 30])
    examples = [Example(0, row, source, target) for row, (source, target) in enumerate(ROWS)]
    batch = BlocksCollator(0)([examples[:2], examples[2:]])
    with torch.no_grad():
        packed, some = text_rows(model, batch), text_rows(model, batch, wanted)
        apart = [
            model(torch.tensor([source + target])).logits[0, len(source) - 1 : -1]
            for source, target in ROWS
        ]
    close(packed, torch.cat(apart), 1e-9)
    close(some, packed[:, wanted], 1e-9)
