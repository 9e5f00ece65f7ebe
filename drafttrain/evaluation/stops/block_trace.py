"""Traces of a drafter that drafts a block of slots in one pass (Spec-Drafter).

A slot's state does not depend on the tokens drawn for earlier slots, so the states of every block
are known before any coin is tossed: one pass along the output has them all. It does depend on how
many slots the block has, so fixed lengths are replayed on traces of their own. See `trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.drafters.block import rows_after, states_along
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.evaluation.stops.chain_trace import (
    TraceOptions,
    draw,
    judge,
    rejected_law,
    row_facts,
)
from drafttrain.evaluation.stops.prefix_trace import kept_prefixes
from drafttrain.evaluation.stops.trace import NOTHING, Trace
from drafttrain.models.spec_drafter.model import SpecDrafter


@dataclass(frozen=True)
class Blocks:
    """The blocks at some positions of an output, all of as many slots."""

    starts: Tensor
    """[A] positions."""
    states: Tensor
    """[A, K, D] before previous-token features."""
    logits: Tensor
    """[A, K, V] rows that tokens behind accepted ones are drawn from."""
    kept: Tensor
    """[A, K] probability that the slot was accepted, given the output; 0 beyond its end."""


@torch.inference_mode()
def log_block_trace(
    target: CachedModel,
    drafter: SpecDrafter,
    source: Source,
    output: Sequence[int],
    options: TraceOptions,
    randomness: Randomness,
) -> Trace:
    """The trace of blocks of options.depth slots (fewer near the maximal length).

    source: as `CachedModel.read` of the target gives it. With previous-token features, rows behind
    wrong tokens are those of rejection, whatever the rule: under block verification only policies
    that look at no row are replayed in law (`Workbench.replays`).
    """
    tokens = torch.tensor(output, dtype=torch.long)
    length, depth, tosses = len(tokens), options.depth, options.tosses
    room = target.max_new_tokens(source, options.max_new_tokens)
    target_probs = judge(target, source, tokens.to(source.prefix.device), options)
    longest = np.minimum(depth, room - 1 - np.arange(length))
    run = np.zeros((tosses, length), dtype=np.int32)
    index = np.full((tosses, length, depth), NOTHING, dtype=np.int32)
    states, rows, total = [], [], 0
    for blocks in _all_blocks(drafter, source, tokens, target_probs, longest, options):
        slots = blocks.states.shape[1]
        own_pool = bool(drafter.config.previous_token_rank) and not options.sampling.greedy
        for toss in range(tosses):
            for block, start in enumerate(blocks.starts.tolist()):
                run[toss, start] = randomness.accept_run(blocks.kept[block])
            if (
                toss == 0 or own_pool
            ):  # what was drawn before a slot changes rows with its features only
                states.append(blocks.states.flatten(0, 1).float().cpu())
                runs = run[toss, blocks.starts.numpy()]
                found = _rows_of(drafter, blocks, runs, target_probs, options.sampling, randomness)
                rows.append(found.flatten(0, 1).double().cpu().numpy())
                first, total = total, total + found[..., 0].numel()
            places = first + np.arange(len(blocks.starts) * slots).reshape(-1, slots)
            index[toss, blocks.starts.numpy(), :slots] = places
    width = drafter.config.d_model
    return Trace(
        tokens=length,
        block=True,
        lag=0,
        states=torch.cat(states) if states else torch.zeros(0, width),
        rows=np.concatenate(rows) if rows else np.zeros((0, 2)),
        index=index,
        run=run,
        longest=np.broadcast_to(longest, run.shape).astype(np.int32),
        limit=longest.astype(np.int32),
        before=len(source.prefix),
    )


def _all_blocks(
    drafter: SpecDrafter,
    source: Source,
    tokens: Tensor,
    target_probs: Tensor,
    longest: np.ndarray,
    options: TraceOptions,
) -> Iterator[Blocks]:
    """Blocks of every number of slots that occurs along the output."""
    device = target_probs.device
    for found, states, previous in states_along(drafter, source, tokens, longest.tolist()):
        logits, starts = rows_after(drafter, states, previous), torch.tensor(found)
        places = starts[:, None] + torch.arange(states.shape[1])
        inside = (places < len(tokens)).to(device)
        places = places.clamp_max(len(tokens) - 1)
        at = tokens[places].to(device)[..., None]
        at_draft = warp(logits, options.sampling).to(device).gather(-1, at)[..., 0]
        at_target = target_probs[places.to(device)].gather(-1, at)[..., 0]
        weighed = options.verifier == "block"
        kept, _ = kept_prefixes(at_draft.to(at_target), at_target, weighed)
        kept = torch.where(inside, kept, 0.0)
        yield Blocks(starts, states, logits, kept)


def _rows_of(
    drafter: SpecDrafter,
    blocks: Blocks,
    runs: np.ndarray,
    target_probs: Tensor,
    sampling: Sampling,
    randomness: Randomness,
) -> Tensor:
    """`RowFacts` of every slot's row. [A, K, 2].

    Where rows have previous-token features, those behind wrong tokens. In greedy drafting a policy
    is shown the rows without them (see the drafter).
    """
    if not drafter.config.previous_token_rank:
        return row_facts(blocks.logits)
    if sampling.greedy:
        return row_facts(drafter.project(blocks.states))
    found = row_facts(blocks.logits)
    for block, start in enumerate(blocks.starts.tolist()):
        accepted = int(runs[block])
        row = blocks.logits[block, min(accepted, blocks.logits.shape[1] - 1)]
        for slot in range(accepted + 1, blocks.logits.shape[1]):
            law = warp(row[None], sampling)
            place = start + slot - 1
            if slot == accepted + 1 and place < len(target_probs):
                law = rejected_law(law, target_probs[place][None].to(law.device))
            previous = torch.tensor(draw(law, sampling, randomness), device=row.device)
            row = rows_after(drafter, blocks.states[block, slot][None], previous)[0]
            found[block, slot] = row_facts(row)
    return found
