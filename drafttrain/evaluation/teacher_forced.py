"""Teacher-forced acceptance: the rounds that greedy verification would run, from one pass.

Where a drafter predicts the blocks at *all* prefixes of a known output in one parallel pass,
greedy decoding need not be run: its rounds visit prefixes p, p + accepted + 1, ..., and what they
accept is read off by comparing the predicted block with the output itself. The result equals
decoding exactly when the output is the target's own greedy output. No time is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.data.batches.examples import Example, Examples
from drafttrain.decoding.types import Round
from drafttrain.evaluation.metrics import first_difference

ROWS_AT_ONCE = 64
"""Held-out rows that are usually read at a time while a drafter trains."""


def replay_rounds(
    predicted: Tensor,
    reference: Sequence[int],
    max_new_tokens: int | None = None,
    sequence: int = 0,
) -> list[Round]:
    """The rounds of greedy verification along a known output.

    A round at prefix p drafts predicted[p], accepts its longest common beginning with
    reference[p:], and emits one token more: the correction, or the bonus. EOS is the last token
    of the reference; a draft that contains it ends the walk without a bonus. With max_new_tokens,
    drafts leave room for that one token, as the decoding loop does. Where the first token of
    predicted[p] is below 0, nothing is drafted.

    Shapes: predicted [P, k], P >= number of reference tokens; reference [L] with its EOS.
    """
    if len(predicted) < len(reference):
        raise ValueError(
            f"predicted has blocks for {len(predicted)} prefixes but the reference has "
            f"{len(reference)} tokens; predict a block at every prefix length 0..L-1"
        )
    reference = [int(token) for token in reference]
    rounds: list[Round] = []
    start = 0
    while start < len(reference):
        block = predicted[start].tolist()
        block = [] if block[0] < 0 else block
        if max_new_tokens is not None:
            block = block[: max_new_tokens - start - 1]
        wrong = first_difference(block, reference[start:])
        accepted = len(block) if wrong is None else wrong
        emitted = reference[start : start + accepted + 1]
        start += len(emitted)
        rounds.append(
            Round(
                sequence=sequence,
                drafted=block,
                path=range(accepted),
                emitted=emitted,
                passes=int(len(block) > 0),
                finished=start == len(reference),
            )
        )
    return rounds


@dataclass(frozen=True)
class BlockValidation:
    """What a block drafter is worth while it trains, on held-out rows read in parallel.

    Teacher-forced tokens per round (exact for greedily distilled rows), loss, slot accuracy.
    """

    rows: Examples
    collate: Callable[[Sequence[Example]], Any]
    predict_blocks: Callable[[nn.Module, Example], Tensor]
    """The objective, a row -> [L, k] drafts at every prefix of its output."""
    at_once: int = ROWS_AT_ONCE
    """Rows that are read at a time."""

    def __call__(self, objective: nn.Module) -> dict[str, float]:
        """The objective's `model` is validated; it maps (batch, progress) to LossSums."""
        device = objective.model.device
        tokens = rounds = 0
        sums = torch.zeros(4, dtype=torch.float64)
        for start in range(0, len(self.rows), self.at_once):
            end = min(start + self.at_once, len(self.rows))
            chunk = self.rows.__getitems__([(0, row) for row in range(start, end)])
            found = objective(self.collate(chunk).to(device), 1.0)
            sums += torch.stack([value.double().cpu() for value in found])
            for example in chunk:
                blocks, output = self.predict_blocks(objective, example), example.target_ids
                tokens, rounds = tokens + len(output), rounds + len(replay_rounds(blocks, output))
        loss, weight, correct, counted = sums.tolist()
        return {
            "mean_acceptance_length": tokens / rounds,
            "held_out_loss": loss / weight,
            "slot_accuracy": correct / counted,
        }
