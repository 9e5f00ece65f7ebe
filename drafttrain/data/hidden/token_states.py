"""Labels and hidden states of drafted tokens, for drafters that draft token by token.

For a few distilled rows at a time: one teacher-forced pass of the target judges, one of the drafter
on the outputs draws, and gives the `drawn` states at once: a draft is accepted only behind tokens
that the target could have said, which is what an output is. `token` states take one pass more of
the drafter on each mix of drafted and own tokens (SpecDec++, Section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.commands import CacheConfig
from drafttrain.data.batches.mixing import Mixed, mix_tokens, row_uniforms
from drafttrain.data.shards.states import Labelled
from drafttrain.decoding.engine.cached_model import make_source
from drafttrain.decoding.engine.encoding import Encode, encoder_of
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
    state: StateKind
    mixing: float
    """r: share of positions that keep the output's own token (for `token` states)."""
    settings: CacheConfig
    """What else was asked for: seed, mixes, blocks, size of batches."""
    places: int | None
    """Positions that both models have; None: no limit."""

    @cached_property
    def encode(self) -> Encode:
        """How the target's sources are read, for drafters that read its encoder."""
        found = encoder_of(self.target)
        assert found is not None
        return found


def label_tokens(labelling: Labelling, outputs: Sequence[Output]) -> Iterator[list[Labelled]]:
    """What each output gives to mix 0, 1, ..., in no particular order of outputs."""
    for group in grouped(labelling, outputs):
        sources = [output.source_ids for output in group]
        targets = [output.target_ids for output in group]
        along = teacher_force(labelling.drafter, sources, targets)
        judged = teacher_force(labelling.target, sources, targets)
        mixed = [_mix(labelling, *one) for one in zip(group, judged, along, strict=True)]
        if labelling.state == "drawn":  # as the tokens are drawn, all behind the output's own
            states = (
                [drawn_states(forced.before, forced.logits, one.tokens) for one in mixes]
                for forced, mixes in zip(along, mixed, strict=True)
            )
        else:  # at the tokens' own positions
            fed = [[one.tokens.tolist() for one in of_mix] for of_mix in zip(*mixed, strict=True)]
            by_mix = [forced_states(labelling.drafter, sources, tokens) for tokens in fed]
            states = zip(*by_mix, strict=True)
        for output, mixes, of_mixes in zip(group, mixed, states, strict=True):
            labelled = []
            for one, hidden in zip(mixes, of_mixes, strict=True):
                chosen = one.drafted.nonzero().flatten()
                kept = hidden.float()[chosen]
                labelled.append(Labelled(output.row, chosen, kept, one.acceptance[chosen]))
            yield labelled


def _mix(labelling: Labelling, output: Output, target: Forced, draft: Forced) -> list[Mixed]:
    """The mixes of an output: drafted tokens and their labels, by the rows of both models."""
    length, settings = len(output.target_ids), labelling.settings
    uniforms = [
        row_uniforms(settings.seed, mix, output.row, length) for mix in range(settings.mixes)
    ]
    return mix_tokens(
        torch.tensor(output.target_ids, device=draft.logits.device),
        target_rows(labelling, output, target.logits).to(draft.logits.device),
        warp(draft.logits, labelling.sampling),
        labelling.mixing,
        torch.from_numpy(np.stack(uniforms)),
    )


def target_rows(labelling: Labelling, output: Output, logits: Tensor) -> Tensor:
    """The distributions that verification would hold against a draft along a known output.

    The target's own logits processors see each row's own path. Shapes: logits [L, V] -> [L, V].
    """
    source = make_source(output.source_ids, labelling.target)
    tokens = torch.tensor(output.target_ids[:-1], dtype=torch.long, device=logits.device)
    processors = labelling.processors.start(source, labelling.max_new_tokens)
    return warp(processors(source.prefix, tokens, logits), labelling.sampling)


def grouped(labelling: Labelling, outputs: Sequence[Output]) -> Iterator[list[Output]]:
    """Longest first, as many as fit: rows x longest row <= batch_tokens, and little enough logits.

    Rows of an output go through the output projection, so they count for memory by themselves.
    """
    batch_tokens = labelling.settings.batch_tokens
    positions = max(1, LOGIT_BYTES // (4 * labelling.target.config.vocab_size))
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
