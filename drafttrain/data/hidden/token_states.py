"""Labels and hidden states of drafted tokens, for drafters that draft token by token.

For a few distilled rows at a time: one teacher-forced pass of the target judges, one of the drafter
on the outputs draws, and gives the `drawn` states at once: a draft is accepted only behind tokens
that the target could have said, which is what an output is. `token` states take one pass more of
the drafter on each mix of drafted and own tokens (SpecDec++, Section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.data.batches.mixing import Mixed, mix_tokens, row_uniforms
from drafttrain.data.shards.states import Labelled
from drafttrain.decoding.engine.cached_model import make_source
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.teacher_forcing import Forced, forced_states, teacher_force
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Sampling
from drafttrain.models.draft_states import StateKind, drawn_states

LOGIT_BYTES = 2**29
"""Most bytes of float32 logits of one model at a time, if a row alone does not exceed it."""


@dataclass(frozen=True)
class Output:
    """One distilled row: a source (or prompt) and what the target made of it."""

    row: int
    source_ids: Sequence[int]
    target_ids: Sequence[int]


@dataclass(frozen=True)
class Labelling:
    """How outputs are labelled, and by which models."""

    target: PreTrainedModel
    drafter: PreTrainedModel
    processors: TargetProcessors
    sampling: Sampling
    max_new_tokens: int
    """As the outputs were decoded: some logits processors look at it."""
    seed: int
    mixes: int
    state: StateKind
    mixing: float
    """r: share of positions that keep the output's own token (for `token` states)."""
    k: int
    """Slots of a block (for slots)."""
    blocks_per_row: int | None
    batch_tokens: int
    places: int | None
    """Positions that both models have; None: no limit."""


def label_tokens(labelling: Labelling, outputs: Sequence[Output]) -> Iterator[list[Labelled]]:
    """What each output gives to mix 0, 1, ..., in no particular order of outputs."""
    for group in grouped(outputs, labelling.batch_tokens, labelling.target.config.vocab_size):
        sources = [output.source_ids for output in group]
        targets = [output.target_ids for output in group]
        along = teacher_force(labelling.drafter, sources, targets)
        mixed = _mix_group(labelling, group, along)
        if labelling.state == "drawn":
            states = _drawn_states(along, mixed)
        else:
            states = _fed_states(labelling, sources, mixed)
        for output, mixes, of_mixes in zip(group, mixed, states, strict=True):
            yield [
                _chosen(output, one, hidden.float())
                for one, hidden in zip(mixes, of_mixes, strict=True)
            ]


def _drawn_states(
    along: Sequence[Forced], mixed: Sequence[Sequence[Mixed]]
) -> Iterator[list[Tensor]]:
    """States of each output's mixes as their tokens are drawn, all behind the output's own."""
    for forced, mixes in zip(along, mixed, strict=True):
        yield [drawn_states(forced.before, forced.logits, one.tokens) for one in mixes]


def _fed_states(
    labelling: Labelling, sources: Sequence[Sequence[int]], mixed: Sequence[Sequence[Mixed]]
) -> Iterator[tuple[Tensor, ...]]:
    """States of each output's mixes at their tokens' own positions."""
    by_mix = [
        forced_states(labelling.drafter, sources, [mixes[mix].tokens.tolist() for mixes in mixed])
        for mix in range(labelling.mixes)
    ]
    return zip(*by_mix, strict=True)


def _mix_group(
    labelling: Labelling, group: Sequence[Output], along: Sequence[Forced]
) -> list[list[Mixed]]:
    """The mixes of each output: drafted tokens and their labels. along: the drafter's rows."""
    judged = teacher_force(
        labelling.target,
        [output.source_ids for output in group],
        [output.target_ids for output in group],
    )
    mixed = []
    for output, target, draft in zip(group, judged, along, strict=True):
        length = len(output.target_ids)
        uniforms = [
            row_uniforms(labelling.seed, mix, output.row, length) for mix in range(labelling.mixes)
        ]
        mixed.append(
            mix_tokens(
                torch.tensor(output.target_ids, device=draft.logits.device),
                target_rows(labelling, output, target.logits).to(draft.logits.device),
                warp(draft.logits, labelling.sampling),
                labelling.mixing,
                torch.from_numpy(np.stack(uniforms)),
            )
        )
    return mixed


def target_rows(labelling: Labelling, output: Output, logits: Tensor) -> Tensor:
    """The distributions that verification would hold against a draft along a known output.

    The target's own logits processors see each row's own path. Shapes: logits [L, V] -> [L, V].
    """
    source = make_source(output.source_ids, labelling.target)
    tokens = torch.tensor(output.target_ids[:-1], dtype=torch.long, device=logits.device)
    processors = labelling.processors.start(source, labelling.max_new_tokens)
    return warp(processors(source.prefix, tokens, logits), labelling.sampling)


def _chosen(output: Output, mixed: Mixed, hidden: Tensor) -> Labelled:
    """The drafted positions of one mix. Shapes: hidden [L, D]."""
    positions = mixed.drafted.nonzero().flatten()
    return Labelled(output.row, positions, hidden[positions], mixed.acceptance[positions])


def grouped(
    outputs: Sequence[Output], batch_tokens: int, vocab_size: int
) -> Iterator[list[Output]]:
    """Longest first, as many as fit: rows x longest row <= batch_tokens, and little enough logits.

    Rows of an output go through the output projection, so they count for memory by themselves.
    """
    positions = max(1, LOGIT_BYTES // (4 * vocab_size))
    group: list[Output] = []
    longest = scored = 0
    for output in sorted(outputs, key=lambda one: (-_length(one), one.row)):
        count = len(output.target_ids)
        if group and ((len(group) + 1) * longest > batch_tokens or scored + count > positions):
            yield group
            group, scored = [], 0
        if not group:
            longest = _length(output)
        group.append(output)
        scored += count
    if group:
        yield group


def _length(output: Output) -> int:
    return len(output.source_ids) + len(output.target_ids)
