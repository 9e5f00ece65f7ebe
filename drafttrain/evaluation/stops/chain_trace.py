"""Log traces: decode a prompt, judge the drafter along the output, toss coins, draft on after each
rejection. See `trace.py` for why a replay of them is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.kinds import KINDS, with_states
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import own_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter, Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Proposal, Sampling, Source
from drafttrain.evaluation.stops.drafts_after_rejection import (
    Beside,
    grow_as_tree,
    grow_one_by_one,
    row_facts,
)
from drafttrain.evaluation.stops.prefix_trace import (
    grow_weighed,
    run_prefixes,
    target_beside,
    weighed_law,
    weights_after,
)
from drafttrain.evaluation.stops.trace import (
    AcceptedPath,
    Array,
    Trace,
    WrongBranch,
    join,
    run_lengths,
)
from drafttrain.models.draft_states import StateKind, drafts_tokens, drawn_states

TEXT_DRAFT = 4
"""Draft length with which outputs are decoded; any gives the same output (in law)."""


@dataclass(frozen=True)
class TraceOptions:
    """How outputs are decoded and how often coins are tossed."""

    sampling: Sampling
    max_new_tokens: int
    depth: int
    """K, the most tokens a replayed policy may draft in a round."""
    replicates: int = 1
    """Tosses of the coins for each output; greedy decoding needs one."""
    state_kind: StateKind = "drawn"
    """The kind of states that are logged for heads (of slots for blocks, whatever it is)."""
    verifier: Literal["rejection", "block"] = "rejection"
    """The rule whose rounds are replayed, where tokens are sampled; greedy decoding has one."""

    @property
    def tosses(self) -> int:
        return 1 if self.sampling.greedy else self.replicates


@dataclass(frozen=True)
class Judged:
    """Target and drafter along one output."""

    target_probs: Tensor
    """[L, V] row i judges token i of the output."""
    draft_probs: Tensor
    """[L, V] what the drafter would draw token i from behind accepted tokens."""
    rows: Tensor
    """[L, 2] `RowFacts` of the drafter's rows, before temperature."""


def decode_text(
    target: CachedModel,
    drafter: Drafter,
    source: Source,
    options: TraceOptions,
    randomness: Randomness,
) -> list[int]:
    """An output of the target, EOS included where it came."""
    verifier = build_verifier(AUTO, options.sampling)
    decoder = Decoder(
        target, drafter, FixedLength(TEXT_DRAFT), verifier, options.sampling, lambda _: randomness
    )
    return decoder.decode_all([source], options.max_new_tokens)[0].tokens


@torch.inference_mode()
def log_trace(
    target: CachedModel,
    drafter: CachedModel,
    source: Source,
    output: Sequence[int],
    options: TraceOptions,
    randomness: Randomness,
) -> Trace:
    """The trace of a drafter that drafts one token a pass, along an output of the target."""
    own = own_source(source, drafter.model)  # its decoder may start from another token
    most = drafter.position_limit
    limit = draft_limits(target, most, source, len(own.prefix), len(output), options)
    tokens = torch.tensor(output, dtype=torch.long, device=own.prefix.device)
    fed = (
        tokens
        if drafter.position_limit is None
        else tokens[: drafter.position_limit - len(own.prefix)]
    )
    state = drafter.encode(own)
    before = drafter.catch_up(state, own.prefix)
    along = drafter.feed(state, fed)
    draft_logits = torch.cat([before.logits[-1:], along.logits])[: len(tokens)]
    rows_from = torch.cat([before.hidden[-1:], along.hidden])[: len(tokens)]
    states = along.hidden
    if options.state_kind == "drawn":
        states = drawn_states(rows_from, draft_logits, tokens[: len(draft_logits)])
    judged = Judged(
        target_probs=judge(target, source, tokens.to(source.prefix.device), options),
        draft_probs=_lengthen(warp(draft_logits, options.sampling), len(tokens)).to(target.device),
        rows=_lengthen(row_facts(draft_logits), len(tokens)),
    )
    ends = drafter.eos_ids
    if options.verifier == "block":
        run, branches = weigh_prefixes(judged, tokens, limit, options, ends, randomness)
    else:
        accepted = toss_coins(judged, tokens, limit, options.tosses, randomness)
        branches = start_branches(judged, accepted, limit, options, ends, randomness)
        run = run_lengths(accepted)
    everything = [branch for found in branches for branch in found]
    if options.state_kind == "drawn" and everything:
        places = [branch.position for branch in everything]
        firsts = tokens.new_tensor([branch.tokens[0] for branch in everything])
        drawn = drawn_states(rows_from[places], draft_logits[places], firsts)
        for branch, first in zip(everything, drawn, strict=True):
            branch.drawn = first

    def pick(logits: Tensor) -> list[int]:
        return draw(warp(logits, options.sampling), options.sampling, randomness)

    prefix = len(own.prefix)
    if options.verifier == "block":
        growing = [branch for branch in everything if branch.goes_on]
        places = [branch.position for branch in growing]
        mine = Beside(drafter, state, prefix + len(fed), prefix, places)
        theirs = target_beside(target, source, tokens, places)
        grow_weighed(mine, theirs, growing, options.sampling, randomness)
    elif drafter.takes_branches:
        grow_as_tree(drafter, state, prefix + len(fed), prefix, everything, pick)
    else:
        path = torch.cat([own.prefix, fed])
        grow_one_by_one(drafter, state, path, prefix, everything, pick)
    return join(
        AcceptedPath(
            limit=limit,
            ends=np.array([token in drafter.eos_ids for token in output]),
            lag=1 if options.state_kind == "token" else 0,
            states=_lengthen(states, len(tokens)),
            rows=judged.rows,
            before=len(source.prefix),
        ),
        run,
        branches,
        options.depth,
    )


def check_traceable(target: CachedModel, drafter: Drafter) -> None:
    """Raise ValueError, before anything is decoded, where no trace would be exact.

    A drafter shows its states, and stops drafting where the target's outputs end.
    """
    kind = KINDS.get(drafter.name)
    if kind is None or not kind.states:
        raise ValueError(f"drafter {drafter.name!r} cannot be traced; give {with_states()}")
    if drafter.requires.first_row and (
        kind.drafts == "tokens" or drafts_tokens(drafter.model.config)
    ):
        raise ValueError(
            f"drafter {drafter.name!r} drafts token by token behind what the target makes of the "
            "text, and cannot be traced; compare stop policies of it with `drafttrain eval --sweep`"
        )
    missing = sorted(target.eos_ids - drafter.model.eos_ids) if kind.is_language_model else []
    if missing:
        raise ValueError(
            f"the target ends its outputs with token {missing[0]}, but the drafter's "
            f"generation_config has eos_token_id = {sorted(drafter.model.eos_ids) or None}; add it "
            "there"
        )


def draft_limits(
    target: CachedModel,
    positions: int | None,
    source: Source,
    prefix: int,
    length: int,
    options: TraceOptions,
) -> Array:
    """Most tokens that may be drafted from each position of an output. [L].

    One token less than is left to generate, and what the drafter has so many positions for (None:
    any; the last token of a draft is never fed). prefix: tokens that it is fed before the output.
    """
    places = np.arange(length)
    limit = target.max_new_tokens(source, options.max_new_tokens) - 1 - places
    if positions is not None:
        limit = np.minimum(limit, positions + 1 - prefix - places)
    return np.maximum(limit, 0)


def _lengthen(rows: Tensor, length: int) -> Tensor:
    """Rows of zeros for positions beyond the drafter's own, at which nothing is drafted."""
    missing = length - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def judge(target: CachedModel, source: Source, tokens: Tensor, options: TraceOptions) -> Tensor:
    """The target's distributions along an output, through its own processors. [L, V]."""
    draft = tokens[:-1]
    [score] = target.score([target.encode(source)], [source.prefix], [Proposal.chain(draft)])
    room = target.max_new_tokens(source, options.max_new_tokens)
    process = target.processors(options.sampling).start(source, room)
    return warp(process(source.prefix, draft, score.logits), options.sampling)


def toss_coins(
    judged: Judged, tokens: Tensor, limit: Array, tosses: int, randomness: Randomness
) -> Array:
    """Whether the token drafted at each position is accepted. [R, L].

    Positions at which nothing can be drafted have no coin.
    """
    kept = kept_probability(judged.draft_probs, judged.target_probs, tokens)
    accepted = np.zeros((tosses, len(tokens)), dtype=bool)
    for toss in range(tosses):
        for position in np.flatnonzero(limit > 0):
            accepted[toss, position] = randomness.accept_run(kept[position : position + 1]) == 1
    return accepted


def kept_probability(draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
    """P(the drafted token was accepted | its position holds x) = min(1, draft / target) at x.

    Shapes: [N, V], [N, V], [N] -> [N].
    """
    tokens = tokens.to(target_probs.device)[:, None]
    at_target = target_probs.gather(-1, tokens)[:, 0]
    at_draft = draft_probs.to(target_probs).gather(-1, tokens)[:, 0]
    smallest = torch.finfo(at_target.dtype).tiny
    return (at_draft / at_target.clamp_min(smallest)).clamp_max(1.0)


def start_branches(
    judged: Judged,
    accepted: Array,
    limit: Array,
    options: TraceOptions,
    ends: frozenset[int],
    randomness: Randomness,
) -> list[list[WrongBranch]]:
    """The rejected token at every position whose coin says no: Norm[(draft - target)+]."""
    places = np.argwhere(~accepted & (limit > 0))
    branches: list[list[WrongBranch]] = [[] for _ in accepted]
    if len(places) == 0:
        return branches
    positions = torch.from_numpy(places[:, 1])
    rejected = randomness.categorical(
        rejected_law(judged.draft_probs[positions], judged.target_probs[positions])
    )
    for (toss, position), token in zip(places.tolist(), rejected.tolist(), strict=True):
        most = min(options.depth, int(limit[position]))
        row = judged.rows[position].tolist()
        branches[toss].append(WrongBranch(position, most, [token], [row], ends))
    return branches


def weigh_prefixes(
    judged: Judged,
    tokens: Tensor,
    limit: Array,
    options: TraceOptions,
    ends: frozenset[int],
    randomness: Randomness,
) -> tuple[Array, list[list[WrongBranch]]]:
    """Accepted tokens of a round of block verification from each position, and the token rejected
    behind them. [R, L], and the branches of each toss (`prefix_trace`)."""
    at = tokens.to(judged.target_probs.device)[:, None]
    draft_probs, target_probs = judged.draft_probs, judged.target_probs
    at_draft, at_target = draft_probs.gather(-1, at)[:, 0], target_probs.gather(-1, at)[:, 0]
    run, weights = run_prefixes(
        at_draft.to(at_target), at_target, limit, options.tosses, randomness
    )
    starts = np.arange(len(tokens))
    most = np.minimum(np.minimum(limit, len(tokens) - starts), options.depth)
    places = np.argwhere(run < most)
    branches: list[list[WrongBranch]] = [[] for _ in run]
    if len(places) == 0:
        return run, branches
    accepted = torch.from_numpy(run[tuple(places.T)])
    begun = torch.from_numpy(places[:, 1])
    positions, weight = begun + accepted, weights[begun, accepted].to(draft_probs)
    rows = draft_probs[positions], target_probs[positions], weight
    rejected = randomness.categorical(weighed_law(*rows))
    after = weights_after(*rows, rejected)
    for i, (toss, start) in enumerate(places.tolist()):
        position, count = int(positions[i]), int(accepted[i])
        most_here = min(options.depth, int(limit[start])) - count
        row = judged.rows[position].tolist()
        branch = WrongBranch(position, most_here, [int(rejected[i])], [row], ends)
        branch.start, branch.weight = start, after[i]
        branches[toss].append(branch)
    return run, branches


def rejected_law(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """What a rejected token follows: Norm[(draft - target)+], or draft where that is all zero.

    Shapes: [N, V], [N, V] -> [N, V].
    """
    return weighed_law(draft_probs, target_probs, draft_probs.new_ones(len(draft_probs)))


def draw(probs: Tensor, sampling: Sampling, randomness: Randomness) -> list[int]:
    """One token a row: drawn, or the arg-max in greedy decoding. [N, V] -> N tokens."""
    drawn = probs.argmax(dim=-1) if sampling.greedy else randomness.categorical(probs)
    return drawn.tolist()
