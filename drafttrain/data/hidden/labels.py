"""Acceptance labels and hidden states of draft tokens, by batches of distilled outputs.

Teacher-forced passes of target and drafter on the outputs give the distributions of both. At each
position a token Y_i is drawn from the drafter's distribution; the drafter's pass also gives the
`drawn` states. The label is the probability P_i = min(1, target(Y_i) / draft(Y_i)) that rejection
sampling accepts Y_i. For `token` states the drafter reads each mix Z in another pass: Z keeps the
output's X_i with probability r and has Y_i elsewhere; the positions of Y_i are in the loss
(SpecDec++, Section 3.3). Labels are those for the prefix X, not recomputed for Z.

Every row has its own random numbers, so the result does not depend on batches or processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.commands import CacheConfig
from drafttrain.data.distill.batches import batches_by_length
from drafttrain.data.hidden.states import Labelled
from drafttrain.data.shards.outputs import ShardRow
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.sources import make_source, source_for_model
from drafttrain.decoding.engine.teacher_forcing import (
    TeacherForced,
    teacher_force,
    teacher_forced_states,
)
from drafttrain.decoding.sampling import draw_tokens, warp
from drafttrain.decoding.types import Sampling, Source
from drafttrain.decoding.verifiers import acceptance_probability
from drafttrain.models.draft_states import drawn_states
from drafttrain.models.loading import LoadedTarget

LOGIT_BYTES = 2**29
"""Maximal bytes of one model's float32 logits at a time, unless a single row needs more."""


@dataclass(frozen=True)
class Labelling:
    """Models and settings for the labelling of outputs."""

    target: LoadedTarget
    drafter: PreTrainedModel
    processors: TargetProcessors
    sampling: Sampling
    max_new_tokens: int
    """Value used when the outputs were decoded; some logits processors read it."""
    settings: CacheConfig


def label_outputs(labelling: Labelling, outputs: Sequence[ShardRow]) -> Iterator[list[Labelled]]:
    """Yields each output's states and labels by mix, in no particular order of outputs."""
    target, drafter, settings = labelling.target.model, labelling.drafter, labelling.settings
    positions = max(1, LOGIT_BYTES // (4 * target.config.vocab_size))
    for group in batches_by_length(outputs, min(settings.batch_tokens, positions)):
        sources = [make_source(output.source_ids, target) for output in group]
        own = [source_for_model(source, drafter) for source in sources]
        targets = [output.target_ids for output in group]
        along = teacher_force(drafter, own, targets)
        judged = teacher_force(target, sources, targets)
        mixed = [_mix(labelling, *one) for one in zip(group, sources, judged, along, strict=True)]
        if settings.state == "drawn":  # the state before each token; prefixes from the output
            states = (
                [drawn_states(forced.before, forced.logits, one.tokens) for one in mixes]
                for forced, mixes in zip(along, mixed, strict=True)
            )
        else:  # at the tokens' own positions, after a forward pass of them
            texts = [[one.tokens.tolist() for one in of_mix] for of_mix in zip(*mixed, strict=True)]
            by_mix = [teacher_forced_states(drafter, own, tokens) for tokens in texts]
            states = ([rows[1:] for rows in of_mixes] for of_mixes in zip(*by_mix, strict=True))
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
    """Draws the mixes of an output: draft tokens and their labels, from both models' logits. The
    target's distributions are those of a verifier: its logits processors see each prefix."""
    settings, tokens = labelling.settings, torch.tensor(output.target_ids)
    processors = labelling.processors.start(source, labelling.max_new_tokens)
    before = tokens[:-1].to(target.logits.device)
    target_probs = warp(processors(source.prefix, before, target.logits), labelling.sampling)
    uniforms = [
        row_uniforms(settings.seed, mix, output.row, len(tokens)) for mix in range(settings.mixes)
    ]
    return mix_tokens(
        tokens.to(draft.logits.device),
        target_probs.to(draft.logits.device),
        warp(draft.logits, labelling.sampling),
        settings.token_mixing or 0.0,
        torch.from_numpy(np.stack(uniforms)),
    )


class Mixed(NamedTuple):
    """One mix of one output. Shapes: all [L]."""

    tokens: Tensor
    """Z: the draft token or the output's token."""
    drafted: Tensor
    """True for draft tokens: these positions are in the loss."""
    acceptance: Tensor
    """P, the label of each draft token; at least float32."""


def row_uniforms(seed: int, mix: int, row: int, count: int) -> np.ndarray:
    """Returns the random numbers of one row in one mix, [count, 2] in [0, 1). Number i depends only
    on seed, mix, row and i: a longer row begins like a shorter one."""
    return np.random.default_rng((seed, mix, row)).random((count, 2))


def mix_tokens(
    output: Tensor, target_probs: Tensor, draft_probs: Tensor, keep: float, uniforms: Tensor
) -> list[Mixed]:
    """Draws R mixes of one output X. `keep` is r, the share of X that stays.

    Shapes: output [L], target_probs and draft_probs [L, V] (warped, row i - 1 for token i),
    uniforms [R, L, 2] -> R mixes.
    """
    drawn = draw_tokens(draft_probs, uniforms[:, :, 0].T)
    mixes = []
    for own, chosen in zip(uniforms, drawn.unbind(1), strict=True):
        drafted = own[:, 1].to(output.device) >= keep
        acceptance = acceptance_probability(target_probs, draft_probs, chosen)
        mixes.append(Mixed(torch.where(drafted, chosen, output), drafted, acceptance))
    return mixes
