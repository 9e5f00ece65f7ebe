"""Log traces: decode a prompt, judge the drafter along the output, toss coins, draft on after each
rejection. See `trace.py` for why a replay of them is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Chance, Drafter, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from drafttrain.evaluation.trace import AcceptedPath, Array, Trace, WrongBranch, join
from drafttrain.evaluation.wrong_branches import (
    GrowingBranch,
    grow_as_tree,
    grow_one_by_one,
    row_entropies,
)

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
    entropies: Tensor
    """[L] of the drafter's rows, before temperature."""


def decode_text(
    target: CachedModel, drafter: Drafter, source: Source, options: TraceOptions, chance: Chance
) -> list[int]:
    """An output of the target, EOS included where it came."""
    verifier = GreedyMatch() if options.sampling.greedy else RejectionSampling()
    decoder = Decoder(target, drafter, FixedLength(TEXT_DRAFT), verifier, options.sampling, chance)
    return decoder.decode_all([source], options.max_new_tokens)[0].tokens


@torch.inference_mode()
def log_trace(
    target: CachedModel,
    drafter: CachedModel,
    source: Source,
    output: Sequence[int],
    options: TraceOptions,
    chance: Chance,
    row: int = 0,
) -> Trace:
    """The trace of a drafter that drafts one token a pass, along an output of the target."""
    tokens = torch.tensor(output, dtype=torch.long, device=source.prefix.device)
    path = torch.cat([source.prefix, tokens])
    room = target.max_new_tokens(source, options.max_new_tokens)
    state = drafter.encode(source)
    before = drafter.catch_up(state, source.prefix)
    along = drafter.feed(state, tokens)
    draft_logits = torch.cat([before.logits[-1:], along.logits[:-1]])
    judged = Judged(
        target_probs=judge(target, source, tokens, options),
        draft_probs=warp(draft_logits, options.sampling).to(target.device),
        entropies=row_entropies(draft_logits),
    )
    accepted = toss_coins(judged, tokens, room, options.tosses, chance)
    branches = start_branches(judged, accepted, room, options.depth, chance)

    def pick(logits: Tensor) -> list[int]:
        return draw(warp(logits, options.sampling), options.sampling, chance)

    everything = [branch for found in branches for branch in found]
    ends = target.eos_ids
    if drafter.takes_trees:
        cached, first = len(path), len(source.prefix)
        grow_as_tree(drafter, state, cached, first, everything, pick, ends)
    else:
        grow_one_by_one(drafter, state, path, len(source.prefix), everything, pick, ends)
    finished: list[dict[int, WrongBranch]] = [
        {branch.position: branch.finished(ends) for branch in found} for found in branches
    ]
    return join(
        AcceptedPath(row, room, output[-1] in ends, along.hidden, judged.entropies),
        accepted,
        finished,
        options.depth,
    )


def judge(target: CachedModel, source: Source, tokens: Tensor, options: TraceOptions) -> Tensor:
    """The target's distributions along an output, through its own processors. [L, V]."""
    draft = tokens[:-1]
    [score] = target.score([target.encode(source)], [source.prefix], [Proposal.chain(draft)])
    room = target.max_new_tokens(source, options.max_new_tokens)
    process = target.processors(options.sampling).start(source, room)
    return warp(process(source.prefix, draft, score.logits), options.sampling)


def toss_coins(judged: Judged, tokens: Tensor, room: int, tosses: int, chance: Chance) -> Array:
    """Whether the token drafted at each position is accepted: min(1, draft / target) at X_i.

    The last position that max_new_tokens allows is never drafted and has no coin. [R, L].
    """
    tokens = tokens.to(judged.target_probs.device)
    at_target = judged.target_probs.gather(-1, tokens[:, None])[:, 0]
    at_draft = judged.draft_probs.gather(-1, tokens[:, None])[:, 0].to(at_target)
    smallest = torch.finfo(at_target.dtype).tiny
    kept = (at_draft / at_target.clamp_min(smallest)).clamp_max(1.0)
    accepted = np.zeros((tosses, len(tokens)), dtype=bool)
    for toss in range(tosses):
        for position in range(min(len(tokens), room - 1)):
            accepted[toss, position] = chance.accept_run(kept[position : position + 1]) == 1
    return accepted


def start_branches(
    judged: Judged, accepted: Array, room: int, depth: int, chance: Chance
) -> list[list[GrowingBranch]]:
    """The rejected token at every position whose coin says no: Norm[(draft - target)+]."""
    places = np.argwhere(~accepted[:, : max(room - 1, 0)])
    branches: list[list[GrowingBranch]] = [[] for _ in accepted]
    if len(places) == 0:
        return branches
    positions = torch.from_numpy(places[:, 1])
    rejected = chance.categorical(
        rejected_law(judged.draft_probs[positions], judged.target_probs[positions])
    )
    for (toss, position), token in zip(places.tolist(), rejected.tolist(), strict=True):
        most = min(depth, room - 1 - position)
        entropy = float(judged.entropies[position])
        branches[toss].append(GrowingBranch(position, most, [token], [entropy]))
    return branches


def rejected_law(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """What a rejected token follows: Norm[(draft - target)+], or draft where that is all zero.

    Shapes: [N, V], [N, V] -> [N, V].
    """
    excess = (draft_probs - target_probs.to(draft_probs)).clamp_min(0.0)
    total = excess.sum(dim=-1, keepdim=True)
    return torch.where(total > 0.0, excess / total, draft_probs)


def draw(probs: Tensor, sampling: Sampling, chance: Chance) -> list[int]:
    """One token a row: drawn, or the arg-max in greedy decoding. [N, V] -> N tokens."""
    drawn = probs.argmax(dim=-1) if sampling.greedy else chance.categorical(probs)
    return drawn.tolist()
