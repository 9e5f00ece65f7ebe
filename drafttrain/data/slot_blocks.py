"""Labels and hidden states of slots, for drafters that draft blocks (Spec-Drafter).

A head on a block drafter sees a slot's state, not its token: it predicts the expected acceptance of
slot i, given that slots 1..i-1 were accepted. No decoding is needed to learn that. Speculative
sampling couples draft and output: P(accept and emit x) = min(draft(x), target(x)) and P(emit x) =
target(x), so, given an output X of the target and a block that starts at p, slot j was accepted
with x_j emitted with probability min(1, draft_j(x_j) / target_j(x_j)). One coin a slot decides;
slots up to the first rejection, inclusive, are what decoding would have seen. The label is exact:
sum_v min(target_i(v), draft_i(v)), with slot i's row coupled to y_{i-1} = x_{i-1}. In greedy
decoding it is 1 where the slot's arg-max is x_i, else 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from drafttrain.data.cache_shards import Labelled
from drafttrain.data.mixing import row_uniforms
from drafttrain.data.token_states import Labelling, Output, grouped, target_rows
from drafttrain.decoding.drafters.spec_drafter import block_states
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.teacher_forcing import teacher_force
from drafttrain.models.spec_drafter import SpecDrafter


@torch.inference_mode()
def label_slots(labelling: Labelling, outputs: Sequence[Output]) -> Iterator[list[Labelled]]:
    """What each output gives to mix 0, 1, ..., in no particular order of outputs."""
    drafter = labelling.drafter
    assert isinstance(drafter, SpecDrafter)
    for group in grouped(outputs, labelling.batch_tokens, labelling.target.config.vocab_size):
        sources = [output.source_ids for output in group]
        judged = teacher_force(labelling.target, sources, [output.target_ids for output in group])
        for output, forced in zip(group, judged, strict=True):
            target_probs = target_rows(labelling, output, forced.logits)
            yield [
                _label_blocks(labelling, drafter, output, target_probs, mix)
                for mix in range(labelling.mixes)
            ]


def _label_blocks(
    labelling: Labelling, drafter: SpecDrafter, output: Output, target_probs: Tensor, mix: int
) -> Labelled:
    """The slots that decoding would have seen in blocks along one output."""
    length, k = len(output.target_ids), labelling.k
    numbers = row_uniforms(labelling.seed, mix, output.row, length, k + 1)
    prefixes = draw_prefixes(numbers[:, 0], labelling.blocks_per_row)
    tokens = torch.tensor(output.target_ids)
    blocks, previous = block_states(drafter, torch.tensor(output.source_ids), tokens, prefixes, k)
    target_probs, tokens = target_probs.to(blocks.device), tokens.to(blocks.device)
    coins = torch.from_numpy(numbers[:, 1:]).to(blocks.device)
    alive = torch.arange(len(prefixes), device=blocks.device)
    places = torch.tensor(prefixes, device=blocks.device)
    positions, hidden, acceptance = [], [], []
    for slot in range(k):
        alive = alive[places[alive] + slot < length]
        place = places[alive] + slot
        states = blocks[alive, slot]
        draft_probs = warp(drafter.logits(states, previous[alive, slot]), labelling.sampling)
        overlap = torch.minimum(draft_probs, target_probs[place])
        positions.append(place)
        hidden.append(states.float())
        acceptance.append(overlap.sum(dim=-1).clamp(max=1.0))
        emitted = tokens[place][:, None]
        survival = _survival(overlap.gather(1, emitted), target_probs[place].gather(1, emitted))
        alive = alive[coins[places[alive], slot] < survival]
    return Labelled(output.row, torch.cat(positions), torch.cat(hidden), torch.cat(acceptance))


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
