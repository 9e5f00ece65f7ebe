"""A language model that drafts a block in one call (PARD, arXiv 2504.18583).

It is fed [context, last token, mask x (k - 1)], a chain of one mask token; the last token's row
drafts the first token and every mask's row another one. Masks are dropped from the cache again.
Greedy decoding proposes the arg-max of every row, a point mass. Under sampling each token is drawn
from its own row, which depends on the committed tokens alone, so rejection sampling stays lossless;
so do the rows and states by which a stop policy ends the block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from drafttrain.decoding.drafters.candidates import Link
from drafttrain.decoding.drafters.causal import CausalDrafter, OwnSequence
from drafttrain.decoding.drafters.slots import BLOCKS_AT_ONCE, Slots, SlotSession
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.calls import Feed, StepOutput
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import own_source
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.shared import Call, Steps
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Sampling, Source


class ParallelDrafter(CausalDrafter):
    """Drafts blocks with a decoder-only language model whose config.json has `pard_token`."""

    name = "parallel"
    longest_block = None

    def __init__(self, model: CachedModel) -> None:
        super().__init__(model)
        self.position_limit = model.position_limit

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> ParallelSession:
        """Open a session. Raises ValueError for a source longer than the drafter's positions."""
        return ParallelSession(self, OwnSequence(self.model, source), sampling, randomness)

    @without_gradients
    def blocks_all(self, asked: Sequence[tuple[SequenceState, Tensor, int]]) -> list[StepOutput]:
        """Rows and states of so many slots behind each sequence's committed tokens, in shared
        calls.

        What is missing of the tokens is fed with the masks, which are dropped again. Shapes: tokens
        [T] each, slots K -> logits [K, V], hidden [F, D], whose last K rows belong to them.
        """
        mask = self.model.model.config.pard_token
        feeds = [
            Feed(state, state.align(tokens) + [mask] * (slots - 1), slots)
            for state, tokens, slots in asked
        ]
        outputs = self.model.feed_all(feeds)
        for state, tokens, _ in asked:
            state.settle(len(tokens))
        return outputs

    @torch.inference_mode()
    def slots_along(
        self, source: Source, target_ids: Tensor, prefixes: Sequence[int], k: int
    ) -> Iterator[Slots]:
        """`SlotDrafter.slots_along`.

        The output is read once, then the masks of many prefixes at a time, as branches that see no
        other prefix's; a family that cannot be given branches is fed each block by itself. Raises
        ValueError for blocks that end behind the drafter's positions.
        """
        own = own_source(source, self.model.model)
        text = torch.cat([own.prefix, target_ids[: prefixes[-1]].to(own.prefix.device)])
        ends = [len(own.prefix) + prefix for prefix in prefixes]
        state, first = self.model.encode(own), 0
        feed = self._as_branches if self.model.takes_branches else self._one_by_one
        for states, logits in feed(state, text, ends, k):
            of_group = prefixes[first : first + len(states)]
            yield Slots(of_group, states, lambda blocks, slot, own=logits: own[blocks, slot])
            first += len(states)

    def _as_branches(
        self, state: SequenceState, text: Tensor, ends: Sequence[int], k: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """States [A, k, D] and rows [A, k, V] of blocks behind so many tokens of a text."""
        rows = ends[-1] - ends[0] + 1
        [read] = self.model.feed_all([Feed(state, text[state.cached :].tolist(), rows)])
        places = torch.arange(len(text))
        for start in range(0, len(ends), BLOCKS_AT_ONCE):
            anchors = torch.tensor(ends[start : start + BLOCKS_AT_ONCE])
            newest = anchors - ends[0]
            states, logits = read.hidden[-rows:][newest][:, None], read.logits[newest][:, None]
            if k > 1:
                begun, slots = torch.cartesian_prod(anchors, torch.arange(1, k)).view(-1, 2).T
                earlier = (begun[:, None] == begun) & (slots[:, None] >= slots)
                visible = torch.cat([places < begun[:, None], earlier], 1)
                masks = torch.full_like(slots, self.model.model.config.pard_token)
                found = self.model.extend(state, masks, visible, begun - 1 + slots)
                self.model.forget(state, len(text))
                shape = (len(anchors), k - 1, -1)
                states = torch.cat([states, found.hidden.view(shape)], 1)
                logits = torch.cat([logits, found.logits.view(shape)], 1)
            yield states, logits

    def _one_by_one(
        self, state: SequenceState, text: Tensor, ends: Sequence[int], k: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`_as_branches` for families that cannot be given branches."""
        for end in ends:
            [found] = self.blocks_all([(state, text[:end], k)])
            yield found.hidden[None, -k:], found.logits[None]


class ParallelSession(SlotSession):
    """One sequence: the committed tokens are cached, slots never are. A drafter behind the target's
    states gives `blocks_all` and a sequence of its own."""

    def __init__(
        self,
        drafter: ParallelDrafter,
        own: OwnSequence,
        sampling: Sampling,
        randomness: Randomness,
        link: Link | None = None,
    ) -> None:
        self.drafter, self.own = drafter, own
        self.sampling, self.randomness, self.link = sampling, randomness, link

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        return self.own.longest(wanted, len(tokens), target_state)

    def slot_rows(self, tokens: Tensor, slots: int) -> Steps[tuple[Tensor, Tensor]]:
        state = yield from self.own.begin()
        score = yield Call(self.drafter.blocks_all, (state, tokens, slots))
        return score.hidden[-slots:], score.logits
