"""Traces of a drafter that drafts a block of slots in one pass and shows their states.

A slot's state does not depend on the tokens drawn for earlier slots, so the states of every block
are known before any coin is tossed: one pass along the output has them all. (Where slots are fed
the first token that is drafted, those of blocks whose first token is wrong come from another pass.)
It may depend on how many slots the block has, so fixed lengths are replayed on traces of their own.
See `trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.drafters.slots import SlotDrafter, Slots, by_length
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.evaluation.stops.chain_trace import (
    TraceOptions,
    draft_limits,
    draw,
    judge,
    rejected_law,
    row_facts,
)
from drafttrain.evaluation.stops.prefix_trace import kept_prefixes
from drafttrain.evaluation.stops.trace import NOTHING, Array, Trace


@torch.inference_mode()
def log_block_trace(
    target: CachedModel,
    drafter: SlotDrafter,
    source: Source,
    output: Sequence[int],
    options: TraceOptions,
    randomness: Randomness,
) -> Trace:
    """The trace of blocks of options.depth slots (fewer near the maximal length).

    source: as `CachedModel.read` of the target gives it. Where they depend on the tokens drafted,
    rows and states behind wrong ones are those of rejection, whatever the rule: under block
    verification only policies that look at none are replayed in law (`Workbench.replays`).
    """
    tokens = torch.tensor(output, dtype=torch.long)
    length, depth, tosses = len(tokens), options.depth, options.tosses
    limit = block_limits(target, drafter, source, length, options)
    longest = np.minimum(depth, limit)
    target_probs = judge(target, source, tokens.to(source.prefix.device), options)
    run = np.zeros((tosses, length), dtype=np.int32)
    index = np.full((tosses, length, depth), NOTHING, dtype=np.int32)
    states, rows, total = [], [], 0
    own_pool = (drafter.linked or drafter.feeds_first) and not options.sampling.greedy
    for blocks in _all_blocks(drafter, source, tokens, target_probs, longest, options):
        starts, slots = np.array(blocks.slots.prefixes), blocks.logits.shape[1]
        for toss in range(tosses):
            for block, start in enumerate(starts):
                run[toss, start] = randomness.accept_run(blocks.kept[block])
            if toss == 0 or own_pool:  # else what was drawn in front of a slot changes no row
                runs = run[toss, starts]
                found, shown = _rows_of(blocks, runs, target_probs, options.sampling, randomness)
                states.append(shown.flatten(0, 1).float().cpu())
                rows.append(found.flatten(0, 1).double().cpu().numpy())
                first, total = total, total + found[..., 0].numel()
            places = first + np.arange(len(starts) * slots).reshape(-1, slots)
            index[toss, starts, :slots] = places
    return Trace(
        tokens=length,
        block=True,
        lag=0,
        states=torch.cat(states) if states else torch.zeros(0, 0),
        rows=np.concatenate(rows) if rows else np.zeros((0, 2)),
        index=index,
        run=run,
        longest=np.broadcast_to(longest, run.shape).astype(np.int32),
        limit=longest.astype(np.int32),
        before=len(source.prefix),
    )


def block_limits(
    target: CachedModel, drafter: SlotDrafter, source: Source, length: int, options: TraceOptions
) -> Array:
    """Most tokens that may be drafted from each position of an output (`Trace.limit`). [L]."""
    limit = draft_limits(
        target, drafter.position_limit, source, len(source.prefix), length, options
    )
    if drafter.requires.first_row:  # nothing is drafted before the target's first call
        limit[0] = 0
    if drafter.longest_block is not None:
        limit = np.minimum(limit, drafter.longest_block)
    return limit


@dataclass(frozen=True)
class _Blocks:
    """Blocks along an output, judged."""

    slots: Slots
    logits: Tensor
    """[A, K, V] rows that tokens behind accepted ones are drawn from."""
    kept: Tensor
    """[A, K] probability that the slot was accepted, given the output; 0 beyond its end."""


def _all_blocks(
    drafter: SlotDrafter,
    source: Source,
    tokens: Tensor,
    target_probs: Tensor,
    longest: np.ndarray,
    options: TraceOptions,
) -> Iterator[_Blocks]:
    """Blocks of every number of slots that occurs along the output."""
    device, weighed = target_probs.device, options.verifier == "block"
    for count, prefixes in by_length(longest):
        for slots in drafter.slots_along(source, tokens, prefixes, count):
            every = torch.arange(len(slots.prefixes), device=slots.states.device)
            logits = slots.block_rows(every)
            places = torch.tensor(slots.prefixes)[:, None] + torch.arange(count)
            inside = (places < len(tokens)).to(device)
            places = places.clamp_max(len(tokens) - 1)
            at = tokens[places].to(device)[..., None]
            at_draft = warp(logits, options.sampling).to(device).gather(-1, at)[..., 0]
            at_target = target_probs[places.to(device)].gather(-1, at)[..., 0]
            kept, _ = kept_prefixes(at_draft.to(at_target), at_target, weighed)
            yield _Blocks(slots, logits, torch.where(inside, kept, 0.0))


def _rows_of(
    blocks: _Blocks,
    runs: np.ndarray,
    target_probs: Tensor,
    sampling: Sampling,
    randomness: Randomness,
) -> tuple[Tensor, Tensor]:
    """`RowFacts` of every slot's row, and its state. [A, K, 2], [A, K, D].

    Where rows or states depend on the tokens before them, those behind wrong tokens. In greedy
    drafting a policy is shown the rows without previous-token features (see the drafter).
    """
    slots, logits = blocks.slots, blocks.logits
    every = torch.arange(len(logits), device=logits.device)
    accepted = torch.from_numpy(runs).to(logits.device)
    starts = torch.tensor(slots.prefixes, device=logits.device)

    def draw_wrong(wrong: Tensor, slot: int, rows: Tensor) -> Tensor:
        """The tokens of one slot of blocks in which it is not accepted. [N], [N, V] -> [N]."""
        law, places = warp(rows, sampling), starts[wrong] + slot
        judged = (accepted[wrong] == slot) & (places < len(target_probs))
        if judged.any():
            theirs = target_probs[places[judged].to(target_probs.device)].to(law.device)
            law[judged] = rejected_law(law[judged], theirs)
        return torch.tensor(draw(law, sampling, randomness), device=logits.device)

    wrong, first = every[accepted == 0], None
    if slots.behind is not None and len(wrong) > 0:
        first = draw_wrong(wrong, 0, logits[wrong, 0])
        slots = slots.behind(wrong, first)
    if sampling.greedy and slots.previous is not None:
        alone = [slots.rows_after(every, slot, None) for slot in range(logits.shape[1])]
        return row_facts(torch.stack(alone, 1)), slots.states
    found = row_facts(logits)
    if slots.previous is None:
        if first is not None:
            found[wrong] = row_facts(slots.block_rows(wrong))
        return found, slots.states
    rows = logits[:, 0].clone()
    for slot in range(1, logits.shape[1]):  # `rows` are those of the slot before
        at_rejection = accepted == slot - 1
        rows[at_rejection] = logits[at_rejection, slot - 1]
        wrong = every[accepted < slot]
        if len(wrong) == 0:
            continue
        known = slot == 1 and first is not None
        previous = first if known else draw_wrong(wrong, slot - 1, rows[wrong])
        rows[wrong] = slots.rows_after(wrong, slot, previous)
        found[wrong, slot] = row_facts(rows[wrong])
    return found, slots.states
