"""Acceptance labels and hidden states of draft tokens and slots, by batches of distilled outputs.

Tokens: teacher-forced passes of target and drafter on the outputs give the distributions of both.
At each position a token Y_i is drawn from the drafter's distribution; the drafter's pass also gives
the `drawn` states. The label is the probability P_i = min(1, target(Y_i) / draft(Y_i)) that
rejection sampling accepts Y_i. For `token` states the drafter reads each mix Z in another pass: Z
keeps the output's X_i with probability r and has Y_i elsewhere; the positions of Y_i are in the
loss (SpecDec++, Section 3.3). Labels are those for the prefix X, not recomputed for Z.

Slots: a head on a block drafter reads a slot's state, not its token. It predicts the expected
acceptance of slot i, given that slots 1..i-1 were accepted. Speculative sampling couples draft and
output: P(accept and emit x) = min(draft(x), target(x)) and P(emit x) = target(x). So given the
target's output X and a block that starts at p, slot j was accepted, with x_j emitted, with
probability min(1, draft_j(x_j) / target_j(x_j)). One random number per slot decides; decoding would
have seen the slots up to and including the first rejection. The label is exact:
sum_v min(target_i(v), draft_i(v)), with slot i's distribution given y_{i-1} = x_{i-1}. In greedy
decoding it is 1 if the slot's arg-max is x_i, else 0.

Every row has its own random numbers, so the result does not depend on batches or processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.commands import CacheConfig
from drafttrain.data.distill.batches import batches_by_length
from drafttrain.data.hidden.states import Labelled
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.batching import BatchedSteps, run_batched
from drafttrain.decoding.drafters.teacher_forced import (
    KnownOutput,
    TeacherForcedSession,
    read_outputs,
)
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.encoding import Encoder
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.sources import make_source, source_for_model
from drafttrain.decoding.engine.teacher_forcing import (
    TeacherForced,
    teacher_force,
    teacher_forced_states,
)
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import draw_tokens, warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.draft_states import StateKind, drawn_states, state_size

LOGIT_BYTES = 2**29
"""Maximal bytes of one model's float32 logits at a time, unless a single row needs more."""


@dataclass(frozen=True)
class Labelling:
    """Models and settings for the labelling of outputs."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    processors: TargetProcessors
    sampling: Sampling
    max_new_tokens: int
    """Value used when the outputs were decoded; some logits processors read it."""
    state: StateKind
    mixing: float
    """r: share of positions that keep the output's token (for `token` states)."""
    settings: CacheConfig
    """Other settings: seed, mixes, blocks, batch size."""
    places: int | None
    """Maximal number of positions that both models support; None: no limit."""
    slots: Drafter | None = None
    """The drafter's decoding interface, for `slot` states."""

    def sources(self, outputs: Sequence[ShardRow]) -> list[Source]:
        """Returns the sources of outputs, with encoder states if the target has an encoder."""
        target = self.target
        sources = [make_source(one.source_ids, target) for one in outputs]
        if not target.config.is_encoder_decoder:
            return sources
        pairs = zip(sources, Encoder(target)(sources), strict=True)
        return [replace(source, encoded=encoded) for source, encoded in pairs]


def label_tokens(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[Labelled]]:
    """Yields each output's states and labels by mix, in no particular order of outputs."""
    for group in grouped(labelling, outputs):
        sources = labelling.sources(group)
        own = [source_for_model(source, labelling.drafter) for source in sources]
        targets = [output.target_ids for output in group]
        along = teacher_force(labelling.drafter, own, targets)
        judged = teacher_force(labelling.target, sources, targets)
        mixed = [_mix(labelling, *one) for one in zip(group, sources, judged, along, strict=True)]
        if labelling.state == "drawn":  # state before each token; prefixes from the output
            states = (
                [drawn_states(forced.before, forced.logits, one.tokens) for one in mixes]
                for forced, mixes in zip(along, mixed, strict=True)
            )
        else:  # at the tokens' own positions, after feeding them
            fed = [[one.tokens.tolist() for one in of_mix] for of_mix in zip(*mixed, strict=True)]
            by_mix = [teacher_forced_states(labelling.drafter, own, tokens) for tokens in fed]
            states = zip(*by_mix, strict=True)
        for output, mixes, of_mixes in zip(group, mixed, states, strict=True):
            labelled = []
            for one, hidden in zip(mixes, of_mixes, strict=True):
                chosen = one.drafted.nonzero().flatten()
                kept = hidden.float()[chosen]
                labelled.append(Labelled(output.row, chosen, kept, one.acceptance[chosen]))
            yield labelled


def _mix(
    labelling: Labelling,
    output: ShardRow,
    source: Source,
    target: TeacherForced,
    draft: TeacherForced,
) -> list[Mixed]:
    """Draws the mixes of an output: draft tokens and their labels, from both models' logits."""
    length, settings = len(output.target_ids), labelling.settings
    uniforms = [
        row_uniforms(settings.seed, mix, output.row, length) for mix in range(settings.mixes)
    ]
    return mix_tokens(
        torch.tensor(output.target_ids, device=draft.logits.device),
        target_rows(labelling, source, output.target_ids, target.logits).to(draft.logits.device),
        warp(draft.logits, labelling.sampling),
        labelling.mixing,
        torch.from_numpy(np.stack(uniforms)),
    )


def target_rows(
    labelling: Labelling, source: Source, target_ids: Sequence[int], logits: Tensor
) -> Tensor:
    """Returns the target distributions that a verifier would use for drafts along a known output.

    The target's logits processors see the prefix of each position. Shapes: logits [L, V] -> [L, V].
    """
    tokens = torch.tensor(target_ids[:-1], dtype=torch.long, device=logits.device)
    processors = labelling.processors.start(source, labelling.max_new_tokens)
    return warp(processors(source.prefix, tokens, logits), labelling.sampling)


def grouped(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[ShardRow]]:
    """Yields batches by length, of at most batch_tokens tokens and LOGIT_BYTES of logits."""
    positions = max(1, LOGIT_BYTES // (4 * labelling.target.config.vocab_size))
    return batches_by_length(outputs, min(labelling.settings.batch_tokens, positions))


@dataclass(frozen=True)
class Mixed:
    """One mix of one output."""

    tokens: Tensor
    """[L] Z: the draft token or the output's token."""
    drafted: Tensor
    """[L] true for draft tokens: these positions are in the loss."""
    acceptance: Tensor
    """[L] P, the label of each draft token; at least float32."""


def row_uniforms(seed: int, mix: int, row: int, count: int, each: int = 2) -> np.ndarray:
    """Returns the random numbers of one row in one mix, [count, each] in [0, 1).

    Number i depends only on seed, mix, row and i: a longer row begins like a shorter one.
    """
    return np.random.default_rng((seed, mix, row)).random((count, each))


def acceptance_of(tokens: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns min(1, target / draft) at each token (Leviathan et al. 2023, Algorithm 1).

    Shapes: tokens [L, R], target_probs and draft_probs [L, V] -> [L, R].
    """
    return (target_probs.gather(1, tokens) / draft_probs.gather(1, tokens)).clamp(max=1.0)


def mix_tokens(
    output: Tensor, target_probs: Tensor, draft_probs: Tensor, keep: float, uniforms: Tensor
) -> list[Mixed]:
    """Draws R mixes of one output X. `keep` is r, the share of X that stays.

    Shapes: output [L], target_probs and draft_probs [L, V] (warped, row i - 1 for token i),
    uniforms [R, L, 2] -> R mixes.
    """
    drawn = draw_tokens(draft_probs, uniforms[:, :, 0].T)
    acceptance = acceptance_of(drawn, target_probs, draft_probs)
    mixes = []
    for mix in range(len(uniforms)):
        drafted = uniforms[mix, :, 1].to(output.device) >= keep
        tokens = torch.where(drafted, drawn[:, mix], output)
        mixes.append(Mixed(tokens, drafted, acceptance[:, mix]))
    return mixes


Seen = tuple[Tensor, Tensor, Tensor]
"""Positions [N], states [N, D] and acceptance [N] of the first slots of a block."""


@torch.inference_mode()
def label_slots(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[Labelled]]:
    """Yields each output's states and labels by mix, in no particular order of outputs."""
    drafter = labelling.slots
    assert drafter is not None
    target = CachedModel(labelling.target)
    for group in grouped(labelling, outputs):
        sources = labelling.sources(group)
        targets = [output.target_ids for output in group]
        judged = teacher_force(labelling.target, sources, targets)
        known = read_outputs(target, sources, targets, drafter.requires)
        target_probs = [
            target_rows(labelling, source, ids, forced.logits)
            for source, ids, forced in zip(sources, targets, judged, strict=True)
        ]
        rows = [output.row for output in group]
        given = zip(rows, known, target_probs, strict=True)
        yield from run_batched([_label_blocks(labelling, drafter, *one) for one in given])


def _label_blocks(
    labelling: Labelling, drafter: Drafter, row: int, known: KnownOutput, target_probs: Tensor
) -> BatchedSteps[list[Labelled]]:
    """Labels, for every mix, the slots that decoding would have seen in blocks along one output:
    all first slots, then the second slots of blocks whose first was accepted, and so on."""
    settings, length = labelling.settings, len(known.tokens)
    numbers = [
        row_uniforms(settings.seed, mix, row, length, settings.k + 1)
        for mix in range(settings.mixes)
    ]
    first = 1 if drafter.requires.first_row else 0
    chosen = [draw_prefixes(own[:, 0], settings.blocks_per_row, first) for own in numbers]
    width = state_size(labelling.drafter.config, labelling.state)
    session = TeacherForcedSession(drafter, known, labelling.sampling)
    tokens, nothing = known.tokens.to(target_probs.device), target_probs.new_empty(0).float()
    seen: list[list[Seen]] = [[(tokens[:0], nothing.view(0, width), nothing)] for _ in numbers]
    for prefix in sorted({prefix for own in chosen for prefix in own}):
        states, logits = yield from session.slots(prefix, settings.k)
        count = min(len(states), length - prefix)
        if count == 0:
            continue
        places = torch.arange(prefix, prefix + count, device=target_probs.device)
        draft_probs = warp(logits[:count], labelling.sampling).to(target_probs.device)
        overlap = torch.minimum(draft_probs, target_probs[places])
        emitted = tokens[places][:, None]
        survival = _survival(overlap.gather(1, emitted), target_probs[places].gather(1, emitted))
        states, acceptance = states[:count].float(), overlap.sum(dim=-1).clamp(max=1.0)
        for mix, own in enumerate(numbers):
            if prefix in chosen[mix]:
                accepted = torch.from_numpy(own[prefix, 1 : count + 1]) < survival.cpu()
                met = 1 + int(accepted[:-1].cumprod(0).sum())
                seen[mix].append((places[:met], states[:met], acceptance[:met]))
    return [Labelled(row, *_by_slot(of_mix)) for of_mix in seen]


def _by_slot(blocks: Sequence[Seen]) -> Seen:
    """Concatenates the slots of blocks, ordered by slot: all first slots first."""
    slots = torch.cat([torch.arange(len(positions)) for positions, *_ in blocks])
    positions, states, acceptance = map(torch.cat, zip(*blocks, strict=True))
    order = slots.argsort(stable=True).to(states.device)
    return positions[order], states[order], acceptance[order]


def _survival(overlap: Tensor, target: Tensor) -> Tensor:
    """Returns P(slot accepted | token emitted) = min(1, draft / target) at the emitted token.

    0 if the target's probability of the token is 0: decoding would not see the later slots.
    Shapes: overlap (the smaller of both probabilities) and target [A, 1] -> [A].
    """
    return torch.where(target > 0, overlap / target, 0.0).squeeze(-1)


def draw_prefixes(numbers: np.ndarray, count: int | None, first: int = 0) -> list[int]:
    """Chooses the prefix lengths at which blocks start, ascending: all, or those of the `count`
    smallest numbers.

    first: 1 if no block starts before the target's first call. Shapes: numbers [L], one random
    number for each prefix length 0..L-1.
    """
    if count is None or count >= len(numbers) - first:
        return list(range(first, len(numbers)))
    return sorted((first + np.argsort(numbers[first:], kind="stable")[:count]).tolist())
