"""Spec-Drafter as a drafter: one pass drafts a whole block (SpecDec Equation 7).

Greedy decoding proposes the arg-max of every slot, a point mass. Under sampling each token is drawn
from its own slot's row: given the accepted prefix that is the distribution it follows, so rejection
sampling stays lossless. With previous-token features, slot i's row is computed from the token drawn
for slot i - 1 and is again just what the token is drawn from.

A drafter that is told the target's states (`SpecDrafterConfig.state_width`) gets those of the rows
that committed tokens came from. They follow from committed tokens alone, so what is drafted from
them is as lossless as any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.drafters.block_along import block_states, rows_after, what_is_read
from drafttrain.decoding.drafters.candidates import Link
from drafttrain.decoding.drafters.slots import SlotDrafter, Slots, SlotSession
from drafttrain.decoding.engine.calls import Feed, StepOutput
from drafttrain.decoding.engine.encoding import Encoder, given_encoding
from drafttrain.decoding.engine.engine import Engine
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import check_length
from drafttrain.decoding.engine.spec_drafter import SpecDrafterBody
from drafttrain.decoding.engine.teacher_forcing import states_before
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.roles import Randomness
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.shared import Call, Steps
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import Sampling, Source
from drafttrain.models.spec_drafter.model import SpecDrafter

OfSlots = tuple[Tensor, Tensor]
"""Of slots: hidden states [slots, D] and scores without the token before [slots, V]."""


class BlockDrafter(SlotDrafter):
    """Drafts blocks of slots with a trained Spec-Drafter."""

    name = "spec-drafter"

    def __init__(self, model: SpecDrafter, target: PreTrainedModel | None = None):
        self.model, self.target = model.eval(), target
        config = model.config
        limit = None if config.positions == "relative" else config.max_positions
        self.position_limit = limit
        self.lengths_differ = config.slot_attention == "bidirectional"
        self.told_states = config.state_width is not None
        self.nothing_said = Said(0, torch.empty(0, config.state_width or 0, device=model.device))
        """What sequences that begin are told."""
        own_encoder = config.encoder == "own"
        self.requires = TargetRequirements(
            layers=(-1,) if self.told_states else (),
            encoder=not own_encoder,
        )
        self.body = SpecDrafterBody(model)
        encoder = Encoder(model, self._encode) if own_encoder else given_encoding
        self.engine = Engine(self.body, encoder, limit)
        self.link = link_of(model) if config.previous_token_rank else None
        ends = model.config.eos_token_id
        self.eos_ids = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        """Tokens that end a sequence."""
        self.vocabulary: int = config.vocab_size
        """Tokens that it can draft."""

    def project(self, hidden: Tensor) -> Tensor:
        """Scores of every token, before previous-token features. Shapes: [..., D] -> [..., V]."""
        return self.model.project(hidden)

    def _encode(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Its own encoder's output. Shapes: [B, S], [B, S] -> [B, S, D]."""
        return self.model.encode_source(ids, None if mask is None else mask.bool()[:, None, None])

    @without_gradients
    def encode_all(self, sources: Sequence[Source]) -> list[SequenceState]:
        """States with nothing cached; encodes the sources."""
        states = self.engine.begin(sources)
        for state in states:
            own = self.body.cross(state.encoded)
            self.engine.cache.remember_source(state.columns.number, own)
        return states

    def slots_all(
        self, asked: Sequence[tuple[SequenceState, Tensor, list[int], Said | None]]
    ) -> list[OfSlots]:
        """Hidden states that predict what follows, and scores, before previous-token features.

        Of each sequence its state, the tokens of its prefix [P], what stands in the slots behind it
        (masks), and what the target has said: anchored slots have their first row at the last token
        of the prefix.

        Slots are fed as branches: they see the prefix and each other (causal ones those before
        them), and only the prefix stays cached.
        """
        config, feeds = self.model.config, []
        anchored, causal = config.slots == "anchored", config.prefix_attention == "causal"
        causal_slots, first = config.slot_attention == "causal", 1 if anchored else 0
        for state, prefix, slot_ids, said in asked:
            if not causal:
                state.forget(0)
            missing = state.align(prefix) if len(prefix) else []
            ids = missing + slot_ids
            visible = np.ones((len(ids), state.cached + len(ids)), dtype=bool)
            if causal:
                for row in range(len(ids) if causal_slots else len(missing)):
                    visible[row, state.cached + row + 1 :] = False
            states = None
            if self.told_states:
                states = (said or self.nothing_said).at(state.cached, len(prefix))
            rows = len(slot_ids) + first
            feeds.append(Feed(state, ids, rows, torch.from_numpy(visible), states=states))
        outputs = self.engine.call(feeds)
        for state, prefix, *_ in asked:
            state.settle(len(prefix))
        return [_last_rows(output) for output in outputs]

    def behind_first(self, asked: Sequence[tuple[SequenceState, int, int]]) -> list[OfSlots]:
        """The same of slots behind a block's first token, which stands in the first of them: they
        predict what follows that token (`feeds_first`).

        Of each sequence its state, whose prefix has been read, that token, and how many slots.
        """
        config, feeds = self.model.config, []
        own_weights = config.slot_weights == "own"
        for state, first, slots in asked:
            token = first + config.embedding_rows if own_weights else first
            visible = torch.ones(slots, state.cached + slots, dtype=torch.bool)
            ids = [token, *[config.mask_id] * (slots - 1)]
            feeds.append(Feed(state, ids, slots, visible.tril(state.cached)))
        outputs = self.engine.call(feeds)
        for state, *_ in asked:
            state.settle(state.chain)
        return [_last_rows(output) for output in outputs]

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockSession:
        return BlockSession(self, source, sampling, randomness)

    @torch.inference_mode()
    def slots_along(
        self, source: Source, target_ids: Tensor, prefixes: Sequence[int], k: int
    ) -> Iterator[Slots]:
        """The blocks of k slots at some prefix lengths of a known output (`SlotDrafter`)."""
        before = None
        if self.told_states:
            assert self.target is not None
            before = states_before(self.target, [source], [target_ids.tolist()])[0]
        given, read = source.prefix[1:].tolist(), what_is_read(self.model, source)
        found = block_states(self.model, read, target_ids, prefixes, k, given, before)

        def rows(blocks: Tensor, slot: int) -> Tensor:
            return rows_after(self.model, *(part[blocks, slot] for part in found))

        yield Slots(prefixes, found[0], rows)


def _last_rows(output: StepOutput) -> OfSlots:
    return output.hidden[len(output.hidden) - len(output.logits) :], output.logits


@dataclass(frozen=True)
class Said:
    """The target's hidden states that tokens were predicted from, which were committed since the
    sequence's last round."""

    first: int
    """Place of the first of these tokens, the decoder prefix counted."""
    states: Tensor
    """[R, E]"""

    @staticmethod
    def of(target_state: TargetState, given: int) -> Said:
        """Those that a target state has, but for tokens that decoding starts from, so many."""
        states, end = target_state.hidden[-1], target_state.committed
        first = max(end - len(states), given)
        return Said(first, states[len(states) - (end - first) :])

    def at(self, start: int, end: int) -> Tensor:
        """Those of the tokens at places start..end-1; zeros where there is none: before them, and
        with others' drafts behind them. Shapes: -> [end - start, E]."""
        known = self.states[max(start - self.first, 0) : max(end - self.first, 0)]
        before = min(max(self.first - start, 0), end - start)
        return F.pad(known, (0, 0, before, end - start - before - len(known)))


class BlockSession(SlotSession):
    """One sequence: the encoded source and, with a causal prefix, its keys and values."""

    def __init__(
        self, drafter: BlockDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ):
        self.drafter, self.model, self.link = drafter, drafter.model, drafter.link
        self.sampling, self.randomness = sampling, randomness
        config = drafter.model.config
        self.anchored = config.slots == "anchored"
        self.skipped = 0 if self.anchored else 1  # paper slots: no start token
        self.device = drafter.engine.device
        if config.encoder == "own":
            check_length(len(source.input_ids), None)
        self._source = source
        self.state: SequenceState | None = None
        self.said: Said | None = None
        self._verified = len(source.prefix)
        """Tokens, the first ones, whose states are known by now, or will never be."""
        self._settled = 0
        """Those of them that have been fed with theirs."""

    def longest(self, tokens: Tensor, wanted: int, target_state: TargetState | None) -> int:
        if self.drafter.told_states and target_state is not None:
            self.said = Said.of(target_state, len(self._source.prefix))
            self._verified = target_state.committed
        return wanted

    def slot_rows(self, tokens: Tensor, slots: int) -> Steps[OfSlots]:
        if not self.model.config.feeds_first:
            masks = [self.model.config.mask_id] * (slots - 1 if self.anchored else slots)
            return (yield from self._read(tokens, masks))
        return (yield from self._rows_behind(tokens, slots, lambda row: int(row.argmax())))

    def chain_rows(self, tokens: Tensor, slots: int) -> Steps[tuple[Tensor, Tensor, Tensor | None]]:
        """A first token that is fed is the one drafted: under sampling the one drawn."""
        if self.sampling.greedy or not self.model.config.feeds_first:
            return (*(yield from self.slot_rows(tokens, slots)), None)
        drawn: list[Tensor] = []

        def draw(row: Tensor) -> int:
            drawn.append(self.randomness.categorical(warp(row, self.sampling)))
            return int(drawn[0])

        hidden, logits = yield from self._rows_behind(tokens, slots, draw)
        return hidden, logits, (drawn[0] if drawn else None)

    def _read(self, tokens: Tensor, slot_ids: list[int]) -> Steps[OfSlots]:
        """As `BlockDrafter.slots_all`; caches the prefix."""
        if self.state is None:
            self.state = yield Call(self.drafter.encode_all, self._source)
        if self.drafter.told_states:  # others' drafts were fed with none
            self.state.forget(min(self.state.cached, self._settled))
            self._settled = min(self._verified, len(tokens))
        asked = self.state, tokens[self.skipped :], slot_ids, self.said
        return (yield Call(self.drafter.slots_all, asked))

    def _rows_behind(
        self, tokens: Tensor, slots: int, choose: Callable[[Tensor], int]
    ) -> Steps[OfSlots]:
        """As `slot_rows`, with the block's first token fed, as chosen by its row [1, V]."""
        hidden, logits = yield from self._read(tokens, [])
        if slots == 1:
            return hidden, logits
        row = logits
        if self.link is not None:
            told = torch.tensor([self.told_first(tokens)], device=self.device)
            row = self.link.after(hidden, logits, told)
        fed = self.state, choose(row), slots - 1
        behind, logits_behind = yield Call(self.drafter.behind_first, fed)
        return torch.cat((hidden, behind)), torch.cat((logits, logits_behind))

    def told_first(self, tokens: Tensor) -> int:
        """The last committed token, or none, where that token's own row predicts as the target's
        (`slot_weights`)."""
        config = self.model.config
        return int(tokens[-1]) if config.slot_weights == "shared" else config.no_token


@torch.inference_mode()
def link_of(model: SpecDrafter) -> Link:
    """A Spec-Drafter's previous-token features, worked out of every token."""
    every = torch.arange(model.config.no_token + 1, device=model.device)
    features, rows = model.previous_token_features(every), model.previous_token_rows()
    return Link(model.previous_token_hidden, rows, features)
