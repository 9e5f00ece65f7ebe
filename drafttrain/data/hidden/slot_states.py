"""Labels and hidden states of slots, for drafters that show those of a block.

A head on a block drafter sees a slot's state, not its token: it predicts the expected acceptance of
slot i, given that slots 1..i-1 were accepted. No decoding is needed to learn that. Speculative
sampling couples draft and output: P(accept and emit x) = min(draft(x), target(x)) and P(emit x) =
target(x), so, given an output X of the target and a block that starts at p, slot j was accepted
with x_j emitted with probability min(1, draft_j(x_j) / target_j(x_j)). One coin a slot decides;
slots up to the first rejection, inclusive, are what decoding would have seen. The label is exact:
sum_v min(target_i(v), draft_i(v)), with slot i's row given y_{i-1} = x_{i-1}. In greedy
decoding it is 1 where the slot's arg-max is x_i, else 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.hidden.states import Labelled
from drafttrain.data.hidden.token_states import (
    Labelling,
    grouped,
    row_uniforms,
    target_rows,
)
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.drafters.slots import SlotDrafter, Slots
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.draft_states import state_size


@torch.inference_mode()
def label_slots(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[Labelled]]:
    """What each output gives to mix 0, 1, ..., in no particular order of outputs."""
    drafter = labelling.slots
    assert drafter is not None
    for group in grouped(labelling, outputs):
        sources = labelling.sources(group)
        judged = teacher_force(labelling.target, sources, [output.target_ids for output in group])
        for output, source, forced in zip(group, sources, judged, strict=True):
            target_probs = target_rows(labelling, source, output.target_ids, forced.logits)
            yield _label_blocks(labelling, drafter, output, source, target_probs)


def _label_blocks(
    labelling: Labelling,
    drafter: SlotDrafter,
    output: ShardRow,
    source: Source,
    target_probs: Tensor,
) -> list[Labelled]:
    """The slots that decoding would have seen in blocks along one output, for every mix."""
    settings, tokens = labelling.settings, torch.tensor(output.target_ids)
    numbers = [
        row_uniforms(settings.seed, mix, output.row, len(tokens), settings.k + 1)
        for mix in range(settings.mixes)
    ]
    first = 1 if drafter.requires.first_row else 0
    chosen = [draw_prefixes(own[:, 0], settings.blocks_per_row, first) for own in numbers]
    width = state_size(labelling.drafter.config, labelling.state)
    nothing = torch.empty(0, dtype=torch.long), torch.empty(0, width), torch.empty(0)
    seen: list[list[Seen]] = [[nothing] for _ in numbers]
    prefixes = sorted({prefix for own in chosen for prefix in own})
    for slots in drafter.slots_along(source, tokens, prefixes, settings.k):
        device, begun = slots.states.device, np.array(slots.prefixes)
        walk = _Walk(
            slots, *(own.to(device) for own in (torch.tensor(begun), tokens, target_probs))
        )
        for mix, coins in enumerate(numbers):
            blocks = np.flatnonzero(np.isin(begun, chosen[mix]))
            own = torch.from_numpy(coins[begun, 1:]).to(device)
            seen[mix] += walk.walk(torch.from_numpy(blocks).to(device), own, labelling.sampling)
    return [
        Labelled(output.row, *(torch.cat(column) for column in zip(*of_mix, strict=True)))
        for of_mix in seen
    ]


Seen = tuple[Tensor, Tensor, Tensor]
"""Positions [N], states [N, D] and acceptance [N] of one slot of some blocks."""


@dataclass(frozen=True)
class _Walk:
    """Blocks along one output, to be walked slot by slot."""

    slots: Slots
    prefixes: Tensor
    """[A]"""
    tokens: Tensor
    """[L]"""
    target_probs: Tensor
    """[L, V]"""

    def walk(self, alive: Tensor, coins: Tensor, sampling: Sampling) -> Iterator[Seen]:
        """All first slots of some blocks, then the second slots of those whose first was accepted,
        and so on. Shapes: numbers of the blocks [N], coins [A, K] in [0, 1)."""
        for slot in range(coins.shape[1]):
            alive = alive[self.prefixes[alive] + slot < len(self.tokens)]
            place, judged = self.prefixes[alive] + slot, self.target_probs
            draft_probs = warp(self.slots.rows(alive, slot), sampling)
            overlap = torch.minimum(draft_probs, judged[place])
            acceptance = overlap.sum(dim=-1).clamp(max=1.0)
            yield place, self.slots.states[alive, slot].float(), acceptance
            emitted = self.tokens[place][:, None]
            survival = _survival(overlap.gather(1, emitted), judged[place].gather(1, emitted))
            alive = alive[coins[alive, slot] < survival]


def _survival(overlap: Tensor, target: Tensor) -> Tensor:
    """P(the slot was accepted | its token was emitted) = min(1, draft / target) at that token.

    0 where the target would never have emitted it: nothing beyond is what decoding sees.
    Shapes: [A, 1], [A, 1] -> [A].
    """
    return torch.where(target > 0, overlap / target, 0.0).squeeze(-1)


def draw_prefixes(numbers: np.ndarray, count: int | None, first: int = 0) -> list[int]:
    """Prefix lengths at which blocks start, rising: all, or those of the `count` smallest numbers.

    first: 1 where no block starts before the target's first call. Shapes: numbers [L], one random
    number for each prefix length 0..L-1.
    """
    if count is None or count >= len(numbers) - first:
        return list(range(first, len(numbers)))
    return sorted((first + np.argsort(numbers[first:], kind="stable")[:count]).tolist())
