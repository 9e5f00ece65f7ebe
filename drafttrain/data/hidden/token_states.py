"""Labels and hidden states of draft tokens, for drafters that draft token by token.

For a few distilled rows at a time: one teacher-forced pass of the target judges; one of the drafter
on the outputs draws a token Y_i from the row at each position, and gives the `drawn` states at
once. The label is the probability P_i = min(1, target(Y_i) / draft(Y_i)) that rejection sampling
accepts Y_i. For `token` states the drafter reads each mix Z once more: Z keeps the output's X_i
with probability r and has Y_i elsewhere; the positions of Y_i are in the loss (SpecDec++, Section
3.2). Labels are those of the prefix X, not recomputed for Z.

Every row draws from its own random numbers, so neither batches nor processes change anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.commands import CacheConfig
from drafttrain.data.distill.batches import batches_by_length
from drafttrain.data.hidden.states import Labelled
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.drafters.slots import SlotDrafter
from drafttrain.decoding.engine.encoding import encoder_of
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.sources import make_source, own_source, start_token
from drafttrain.decoding.engine.teacher_forcing import Forced, forced_states, teacher_force
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.draft_states import StateKind, drawn_states

LOGIT_BYTES = 2**29
"""Most bytes of float32 logits of one model at a time, if a row alone does not exceed it."""


@dataclass(frozen=True)
class Labelling:
    """How outputs are labelled, and by which models."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    processors: TargetProcessors
    sampling: Sampling
    max_new_tokens: int
    """As the outputs were decoded: some logits processors look at it."""
    state: StateKind
    mixing: float
    """r: share of positions that keep the output's own token (for `token` states)."""
    settings: CacheConfig
    """What else was asked for: seed, mixes, blocks, size of batches."""
    places: int | None
    """Positions that both models have; None: no limit."""
    slots: SlotDrafter | None = None
    """The drafter as it drafts, for states of slots."""
    clips: Callable[[int], Tensor] | None = None
    """Of targets that hear: what their encoder makes of the clip of a row, [S, E]."""

    def sources(self, outputs: Sequence[ShardRow]) -> list[Source]:
        """What outputs were made from, as the target has read it."""
        if self.clips is not None:
            return [self._clip(self.clips(output.row), output) for output in outputs]
        target = self.target
        sources = [make_source(one.source_ids, target, one.prefix_ids) for one in outputs]
        encode = encoder_of(target)
        if encode is None:
            return sources
        pairs = zip(sources, encode(sources), strict=True)
        return [replace(source, encoded=encoded) for source, encoded in pairs]

    def _clip(self, encoded: Tensor, output: ShardRow) -> Source:
        prefix = torch.tensor([start_token(self.target), *output.prefix_ids])
        encoded = encoded.to(self.target.device, self.target.dtype)
        return Source({}, prefix.to(self.target.device), encoded=encoded)


def label_tokens(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[Labelled]]:
    """What each output gives to mix 0, 1, ..., in no particular order of outputs."""
    for group in grouped(labelling, outputs):
        sources = labelling.sources(group)
        own = [own_source(source, labelling.drafter) for source in sources]
        targets = [output.target_ids for output in group]
        along = teacher_force(labelling.drafter, own, targets)
        judged = teacher_force(labelling.target, sources, targets)
        mixed = [_mix(labelling, *one) for one in zip(group, sources, judged, along, strict=True)]
        if labelling.state == "drawn":  # as the tokens are drawn, all behind the output's own
            states = (
                [drawn_states(forced.before, forced.logits, one.tokens) for one in mixes]
                for forced, mixes in zip(along, mixed, strict=True)
            )
        else:  # at the tokens' own positions
            fed = [[one.tokens.tolist() for one in of_mix] for of_mix in zip(*mixed, strict=True)]
            by_mix = [forced_states(labelling.drafter, own, tokens) for tokens in fed]
            states = zip(*by_mix, strict=True)
        for output, mixes, of_mixes in zip(group, mixed, states, strict=True):
            labelled = []
            for one, hidden in zip(mixes, of_mixes, strict=True):
                chosen = one.drafted.nonzero().flatten()
                kept = hidden.float()[chosen]
                labelled.append(Labelled(output.row, chosen, kept, one.acceptance[chosen]))
            yield labelled


def _mix(
    labelling: Labelling, output: ShardRow, source: Source, target: Forced, draft: Forced
) -> list[Mixed]:
    """The mixes of an output: drafted tokens and their labels, by the rows of both models."""
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
    """The distributions that verification would hold against a draft along a known output.

    The target's own logits processors see each row's own path. Shapes: logits [L, V] -> [L, V].
    """
    tokens = torch.tensor(target_ids[:-1], dtype=torch.long, device=logits.device)
    processors = labelling.processors.start(source, labelling.max_new_tokens)
    return warp(processors(source.prefix, tokens, logits), labelling.sampling)


def grouped(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[ShardRow]]:
    """Batches of like length, of at most batch_tokens tokens and LOGIT_BYTES of logits."""
    positions = max(1, LOGIT_BYTES // (4 * labelling.target.config.vocab_size))
    return batches_by_length(outputs, min(labelling.settings.batch_tokens, positions))


@dataclass(frozen=True)
class Mixed:
    """One mix of one output."""

    tokens: Tensor
    """[L] Z: the drafted token, or the output's own."""
    drafted: Tensor
    """[L] true where the token was drafted: these positions are in the loss."""
    acceptance: Tensor
    """[L] P, the label of each drafted token; float32 at least."""


def row_uniforms(seed: int, mix: int, row: int, count: int, each: int = 2) -> np.ndarray:
    """Random numbers of one row in one mix, [count, each] in [0, 1).

    Number i depends on seed, mix, row and i alone: a longer row begins like a shorter one.
    """
    return np.random.default_rng((seed, mix, row)).random((count, each))


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """A token of each row by inversion of its distribution function, in float64.

    Tokens of probability zero are never drawn. Shapes: probs [L, V], uniforms [L, R] -> [L, R].
    """
    mass = probs.double().cumsum(dim=-1)
    total = mass[:, -1:].contiguous()
    asked = (uniforms.to(mass) * total).contiguous()
    tokens = torch.searchsorted(mass, asked, right=True)
    last = torch.searchsorted(mass, total)  # first token that reaches the whole mass
    return tokens.minimum(last)


def acceptance_of(tokens: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """min(1, target / draft) at each token (Leviathan et al. 2023, Algorithm 1).

    Shapes: tokens [L, R], target_probs and draft_probs [L, V] -> [L, R].
    """
    return (target_probs.gather(1, tokens) / draft_probs.gather(1, tokens)).clamp(max=1.0)


def mix_tokens(
    output: Tensor, target_probs: Tensor, draft_probs: Tensor, keep: float, uniforms: Tensor
) -> list[Mixed]:
    """R mixes of one output X. `keep` is r, the share of X that stays.

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
