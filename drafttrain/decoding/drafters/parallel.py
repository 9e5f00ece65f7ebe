"""A language model that drafts a block in one call (PARD, arXiv 2504.18583).

It is fed [context, last token, mask x (k - 1)], a chain of one mask token; the last token's row
drafts the first token and every mask's row another one. Masks are dropped from the cache again.
Greedy decoding proposes the arg-max of every row, a point mass. Under sampling each token is drawn
from its own row, which depends on the committed tokens alone, so rejection sampling stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.kinds import DrawKind, Evidence
from drafttrain.decoding.drafters.along import NOT_DRAFTED
from drafttrain.decoding.drafters.causal import OwnSequence
from drafttrain.decoding.drafters.slots import chain_of_slots
from drafttrain.decoding.engine.cached_model import CachedModel, own_source
from drafttrain.decoding.engine.calls import Feed, StepOutput
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import probs_of_tokens
from drafttrain.decoding.shared import Call, Steps
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Proposal, Sampling, Source
from drafttrain.models.causal_drafter import draftable_tokens

ANCHORS_AT_ONCE = 32
"""Prefixes of a known output whose masks are fed in one call."""


class ParallelDrafter:
    """Drafts blocks with a decoder-only language model whose config.json has `pard_token`."""

    name = "parallel"
    provides: frozenset[Evidence] = frozenset({"logits"})
    branches = False

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.requires = model.requires
        self.mask_token: int = model.model.config.pard_token

    @property
    def vocabulary(self) -> int:
        """Tokens that it can draft."""
        return self.model.vocabulary

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self.model.eos_ids

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if sampling.greedy else "iid"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> ParallelSession:
        """Open a session. Raises ValueError for a source longer than the drafter's positions."""
        return ParallelSession(self, source, sampling, randomness)

    @without_gradients
    def blocks_all(self, asked: Sequence[tuple[SequenceState, Tensor, int]]) -> list[StepOutput]:
        """Rows of so many slots behind each sequence's committed tokens, in shared calls.

        What is missing of the tokens is fed with the masks, which are dropped again. Shapes: tokens
        [T] each, slots K -> logits [K, V].
        """
        feeds = [
            Feed(state, state.align(tokens) + [self.mask_token] * (slots - 1), slots)
            for state, tokens, slots in asked
        ]
        outputs = self.model.feed_all(feeds)
        for state, tokens, _ in asked:
            state.settle(len(tokens))
        return outputs


class ParallelSession:
    """One sequence: the committed tokens are cached, masks never are."""

    def __init__(
        self, drafter: ParallelDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.drafter, self.sampling, self.randomness = drafter, sampling, randomness
        self.own = OwnSequence(drafter.model, source)

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Steps[Proposal]:
        slots = self.longest(tokens, stop.longest, target_state)
        if slots == 0:
            return Proposal.empty()
        score = yield from self.rows(tokens, slots)
        return (yield from chain_of_slots(score.logits, stop, self.sampling, self.randomness))

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        """Most tokens of a draft, as of `OwnSequence`."""
        return self.own.longest(wanted, len(tokens), target_state)

    def rows(self, tokens: Tensor, slots: int) -> Steps[StepOutput]:
        """The rows of so many slots behind all committed tokens [T]."""
        state = yield from self.own.begin()
        return (yield Call(self.drafter.blocks_all, (state, tokens, slots)))


def open_drafter(model: PreTrainedModel, target: PreTrainedModel | None) -> ParallelDrafter:
    """What the kind's row opens it with."""
    draftable = draftable_tokens(model.config, model.get_output_embeddings().out_features)
    return ParallelDrafter(CachedModel(model, draftable=draftable))


@torch.inference_mode()
def probs_along(
    drafter: ParallelDrafter,
    source: Source,
    target_ids: Tensor,
    longest: Sequence[int],
    sampling: Sampling,
) -> Tensor:
    """How likely it drafts an output's own tokens (`drafters/along.py`), L >= 1.

    The output is read once, then the masks of many prefixes at a time, as branches that see no
    other prefix's. Raises ValueError for families that cannot be given branches.
    """
    model, length, k = drafter.model, len(target_ids), max(longest)
    model.check_branches()
    own = own_source(source, model.model)
    prompt, most = len(own.prefix), model.position_limit
    fed = target_ids[:-1].to(own.prefix.device)
    if most is not None:
        fed = fed[: max(most - prompt, 0)]
    state, rows = model.encode(own), len(fed) + 1
    start = 1 if state.cached else 0
    found = torch.full((length, k), NOT_DRAFTED, dtype=torch.double)
    if start == rows:
        return found
    missing = [*own.prefix.tolist(), *fed.tolist()][state.cached :]
    [read] = model.feed_all([Feed(state, missing, rows - start)])
    found[start:rows, 0] = probs_of_tokens(read.logits, target_ids[start:rows], sampling)
    limit = length + prompt + k if most is None else most
    for first in range(start, rows, ANCHORS_AT_ONCE):
        anchors = torch.arange(first, min(first + ANCHORS_AT_ONCE, rows))
        anchors, slots = torch.cartesian_prod(anchors, torch.arange(1, k)).view(-1, 2).T
        fits = prompt - 1 + anchors + slots < limit
        found[anchors[fits], slots[fits]] = 0.0
        fits &= anchors + slots < length
        if not fits.any():
            break
        anchors, slots = anchors[fits], slots[fits]
        earlier = (anchors[:, None] == anchors) & (slots[:, None] >= slots)
        text = torch.arange(prompt + len(fed)) < prompt + anchors[:, None]
        positions = prompt - 1 + anchors + slots
        masks, visible = torch.full_like(slots, drafter.mask_token), torch.cat([text, earlier], 1)
        logits = model.extend(state, masks, visible, positions).logits
        found[anchors, slots] = probs_of_tokens(logits, target_ids[anchors + slots], sampling)
        model.forget(state, prompt + len(fed))
    return found
