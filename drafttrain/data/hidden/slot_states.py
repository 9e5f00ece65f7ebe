"""Labels and hidden states of slots, for drafters that draft blocks (Spec-Drafter).

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

from drafttrain.data.batches.mixing import row_uniforms
from drafttrain.data.hidden.token_states import Labelling, Output, grouped, target_rows
from drafttrain.data.shards.states import Labelled
from drafttrain.decoding.drafters.block import block_states, rows_after, what_is_read
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.spec_drafter.model import SpecDrafter


@torch.inference_mode()
def label_slots(labelling: Labelling, outputs: Sequence[Output]) -> Iterator[list[Labelled]]:
    """What each output gives to mix 0, 1, ..., in no particular order of outputs."""
    drafter = labelling.drafter
    assert isinstance(drafter, SpecDrafter)
    for group in grouped(labelling, outputs):
        sources = labelling.sources(group)
        judged = teacher_force(labelling.target, sources, [output.target_ids for output in group])
        for output, source, forced in zip(group, sources, judged, strict=True):
            target_probs = target_rows(labelling, source, output.target_ids, forced.logits)
            yield _label_blocks(labelling, drafter, output, source, target_probs)


def _label_blocks(
    labelling: Labelling,
    drafter: SpecDrafter,
    output: Output,
    source: Source,
    target_probs: Tensor,
) -> list[Labelled]:
    """The slots that decoding would have seen in blocks along one output, for every mix."""
    settings = labelling.settings
    length, k = len(output.target_ids), settings.k
    target_ids = torch.tensor(output.target_ids)
    read = what_is_read(drafter, source)
    prefixes: list[int] = []
    labelled = []
    for mix in range(settings.mixes):
        numbers = row_uniforms(settings.seed, mix, output.row, length, k + 1)
        chosen = draw_prefixes(numbers[:, 0], settings.blocks_per_row)
        if chosen != prefixes:  # with all blocks, one pass serves all mixes
            prefixes = chosen
            states, previous = block_states(
                drafter, read, target_ids, prefixes, k, output.given_ids
            )
        device = states.device
        walk = _Walk(
            states,
            previous,
            torch.tensor(prefixes, device=device),
            target_ids.to(device),
            target_probs.to(device),
            torch.from_numpy(numbers[prefixes, 1:]).to(device),
        )
        labelled.append(_walk_blocks(walk, drafter, labelling.sampling, output.row))
    return labelled


@dataclass(frozen=True)
class _Walk:
    """Blocks along one output, to be walked slot by slot."""

    states: Tensor
    """[A, k, D]"""
    previous: Tensor
    """[A, k] token of the output before each slot's."""
    prefixes: Tensor
    """[A]"""
    tokens: Tensor
    """[L]"""
    target_probs: Tensor
    """[L, V]"""
    coins: Tensor
    """[A, k] in [0, 1)"""


def _walk_blocks(walk: _Walk, drafter: SpecDrafter, sampling: Sampling, row: int) -> Labelled:
    """All first slots, then the second slots of the blocks whose first was accepted, and so on."""
    alive = torch.arange(len(walk.prefixes), device=walk.prefixes.device)
    positions, hidden, acceptance = [], [], []
    for slot in range(walk.states.shape[1]):
        alive = alive[walk.prefixes[alive] + slot < len(walk.tokens)]
        place, states = walk.prefixes[alive] + slot, walk.states[alive, slot]
        draft_probs = warp(rows_after(drafter, states, walk.previous[alive, slot]), sampling)
        overlap = torch.minimum(draft_probs, walk.target_probs[place])
        positions.append(place)
        hidden.append(states.float())
        acceptance.append(overlap.sum(dim=-1).clamp(max=1.0))
        emitted = walk.tokens[place][:, None]
        survival = _survival(
            overlap.gather(1, emitted), walk.target_probs[place].gather(1, emitted)
        )
        alive = alive[walk.coins[alive, slot] < survival]
    return Labelled(row, torch.cat(positions), torch.cat(hidden), torch.cat(acceptance))


def _survival(overlap: Tensor, target: Tensor) -> Tensor:
    """P(the slot was accepted | its token was emitted) = min(1, draft / target) at that token.

    0 where the target would never have emitted it: nothing beyond is what decoding sees.
    Shapes: [A, 1], [A, 1] -> [A].
    """
    return torch.where(target > 0, overlap / target, 0.0).squeeze(-1)


def draw_prefixes(numbers: np.ndarray, count: int | None) -> list[int]:
    """Prefix lengths at which blocks start, rising: all, or those of the `count` smallest numbers.

    Shapes: numbers [L], one random number for each prefix length 0..L-1.
    """
    if count is None or count >= len(numbers):
        return list(range(len(numbers)))
    return sorted(np.argsort(numbers, kind="stable")[:count].tolist())
