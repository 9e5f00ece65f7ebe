"""Spec-Drafter as a drafter: one pass drafts a whole block (SpecDec Equation 7).

Greedy decoding proposes the arg-max of every slot, a point mass. Under sampling each token is drawn
from its own slot's row: given the accepted prefix that is the distribution it follows, so rejection
sampling stays lossless. With previous-token features, slot i's row is computed from the token drawn
for slot i - 1 and is again just what the token is drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.kinds import DrawKind, Evidence
from drafttrain.decoding.drafters.block_along import rows_after, slots_along
from drafttrain.decoding.drafters.candidates import Candidates
from drafttrain.decoding.drafters.slots import Slots, slots_to_draft
from drafttrain.decoding.engine.batched import Batched
from drafttrain.decoding.engine.calls import Feed
from drafttrain.decoding.engine.encoding import Encode, TextEncoder, given_encoding, pad_texts
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import check_length
from drafttrain.decoding.engine.spec_drafter import read_drafter
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import exact_enough, likeliest, warp
from drafttrain.decoding.shared import Call, Steps, arg_max_of_each
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source
from drafttrain.models.layout import store_column_major
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.rows import Memory


class BlockDrafter:
    """Drafts blocks of slots with a trained Spec-Drafter."""

    name = "spec-drafter"
    provides: frozenset[Evidence] = frozenset({"logits", "hidden"})
    branches = False
    longest_block = None

    def __init__(self, model: SpecDrafter):
        self.model = model.eval()
        store_column_major(model)
        config = model.config
        limit = None if config.positions == "relative" else config.max_positions
        self.position_limit = limit
        self.linked = bool(config.previous_token_rank)
        embed = self._embed if config.soft_copy else None
        encoder, decoder = read_drafter(model)
        encode: Encode = given_encoding
        if encoder is not None:
            encode = TextEncoder(encoder, config.pad_token_id)
        self.requires = TargetRequirements(
            encoder=encoder is None, cross_layers=tuple(config.cross_layers or ())
        )
        self.engine = Batched(
            decoder,
            encode,
            limit,
            embed=embed,
            cross_layers=config.cross_layers,
            pooling=config.source_pooling,
        )
        if self.linked:  # tables, so that a pair of tokens is quickly scored
            with torch.inference_mode():
                every = torch.arange(config.no_token + 1, device=model.device)
                self.previous_token_features = model.previous_token_features(every)
                self.previous_token_rows = model.previous_token_rows()
        ends = model.config.eos_token_id
        self.eos_ids = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        """Tokens that end a sequence."""

    def project(self, hidden: Tensor) -> Tensor:
        """Scores of every token. Shapes: [..., D] -> [..., V]."""
        return self.model.spread(self.engine.stack.logits(hidden))

    def project_all(self, states: Sequence[Tensor]) -> list[Tensor]:
        """`project` of several sequences' slots, in one product."""
        return list(self.project(_joined(states)).split([len(own) for own in states]))

    def _embed(self, feeds: Sequence[Feed], tokens: Tensor, positions: Tensor) -> Tensor:
        """Tokens where they stand, slots softly copied from the source. Shapes: -> [B, N, D]."""
        model, sources = self.model, [feed.state.source for feed in feeds]
        ids, mask = pad_texts(sources, model.config.pad_token_id, self.engine.device)
        memory = Memory([], mask.bool()[:, None, None], model.copied_source(ids))
        copied = model.copy_source(model.embed(tokens), tokens, positions, memory)
        return model.decoder.start(copied, positions)

    def encode_all(self, sources: Sequence[Source]) -> list[SequenceState]:
        """States with nothing cached; encodes the sources."""
        return self.engine.begin(sources)

    def slots_all(self, asked: Sequence[tuple[SequenceState, Tensor, list[int]]]) -> list[Tensor]:
        """Hidden states that predict what follows, before previous-token features: [slots, D] each.

        Of each sequence its state, the tokens of its prefix [P], and what stands in the slots
        behind it (masks): anchored slots have their first row at the last token of the prefix.

        Slots are fed as branches: they see the prefix and each other, and only the prefix stays
        cached.
        """
        config, feeds = self.model.config, []
        anchored, causal = config.slots == "anchored", config.prefix_attention == "causal"
        for state, prefix, slot_ids in asked:
            if not causal:
                state.forget(0)
            missing = state.align(prefix) if len(prefix) else []
            ids = missing + slot_ids
            visible = np.ones((len(ids), state.cached + len(ids)), dtype=bool)
            if causal:
                for row in range(len(missing)):
                    visible[row, state.cached + row + 1 :] = False
            feeds.append(Feed(state, ids, 0, torch.from_numpy(visible)))
        outputs = self.engine.call(feeds)
        for state, prefix, _ in asked:
            state.settle(len(prefix))
        first = 1 if anchored else 0
        return [
            output.hidden[len(output.hidden) - len(slot_ids) - first :]
            for output, (*_, slot_ids) in zip(outputs, asked, strict=True)
        ]

    def best_chains(self, asked: Sequence[tuple[Tensor, Tensor, int, int]]) -> list[list[int]]:
        """Likeliest tokens left to right, among the best candidates of each slot alone.

        Of each sequence its slots' states [K, D] and rows [K, V], the last committed token, and how
        many slots. The token before counts where there are previous-token features.
        """
        states = [own[:count] for own, _, _, count in asked]
        logits = [rows[:count] for _, rows, _, count in asked]
        if not self.linked:
            return arg_max_of_each(logits)
        if not any(count for *_, count in asked):
            return [[] for _ in asked]
        candidates = self.candidates(states, logits)
        found = candidates.likeliest_chains([last for _, _, last, _ in asked])
        return [own[:count] for own, (*_, count) in zip(found, asked, strict=True)]

    def candidates(self, states: Sequence[Tensor], logits: Sequence[Tensor]) -> Candidates:
        """The best tokens of slots, to be scored after the token before. Shapes: [K, D], [K, V]."""
        return Candidates(
            _joined(logits),
            self.model.previous_token_hidden(_joined(states)),
            [len(own) for own in states],
            self.previous_token_rows,
            self.previous_token_features,
        )

    @property
    def vocabulary(self) -> int:
        """Tokens that it can draft."""
        return self.model.config.vocab_size

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if sampling.greedy else "iid"

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockSession:
        return BlockSession(self, source, sampling, randomness)

    def slots_along(
        self, source: Source, target_ids: Tensor, prefixes: Sequence[int], k: int
    ) -> Iterator[Slots]:
        """The blocks of k slots at some prefix lengths of a known output (`SlotDrafter`)."""
        return slots_along(self.model, source, target_ids, prefixes, k)


class BlockSession:
    """One sequence: the encoded source and, with a causal prefix, its keys and values."""

    def __init__(
        self, drafter: BlockDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ):
        self.drafter, self.model = drafter, drafter.model
        self.sampling, self.randomness = sampling, randomness
        config = drafter.model.config
        self.anchored = config.slots == "anchored"
        self.skipped = 0 if self.anchored else 1  # paper slots: no start token
        self.device = drafter.engine.device
        if config.encoder == "own":
            check_length(len(source.input_ids), None)
        self._source = source
        self.state: SequenceState | None = None

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Steps[Proposal]:
        slots = stop.longest
        if slots == 0:
            return Proposal.empty()
        hidden = yield from self.slot_states(tokens, slots)
        logits = yield Call(self.drafter.project_all, hidden)
        last = self.told_first(tokens)
        if not self.sampling.greedy:
            return self._draw(hidden, logits, last, stop)
        count = slots_to_draft(stop, logits, hidden)
        drafted = yield Call(self.drafter.best_chains, (hidden, logits, last, count))
        rows = partial(self._rows_along, hidden, logits, [last, *drafted])
        return Proposal.chain(torch.tensor(drafted, dtype=torch.long), hidden=hidden, logits=rows)

    def slot_states(self, tokens: Tensor, slots: int) -> Steps[Tensor]:
        """Hidden states that predict what follows all committed tokens; caches the prefix.

        Before previous-token features. Shapes: tokens [T] -> [slots, D].
        """
        if self.state is None:
            self.state = yield Call(self.drafter.encode_all, self._source)
        masks = [self.model.config.mask_id] * (slots - 1 if self.anchored else slots)
        return (yield Call(self.drafter.slots_all, (self.state, self.prefix_of(tokens), masks)))

    def told_first(self, tokens: Tensor) -> int:
        """What the first slot is told as the token before it: the last committed one, or none,
        where that token's own row predicts as the target's (`slot_weights`)."""
        config = self.model.config
        return int(tokens[-1]) if config.slot_weights == "shared" else config.no_token

    def prefix_of(self, tokens: Tensor) -> Tensor:
        """The committed tokens as the drafter's decoder is fed them. Shapes: [T] -> [P]."""
        return tokens[self.skipped :]

    def slot_logits(self, state: Tensor, previous: Tensor) -> Tensor:
        """Rows of one slot, each after another token. Shapes: state [D], previous [F] -> [F, V].

        Without previous-token features the token before makes no difference.
        """
        model, previous = self.model, previous.to(self.device)
        if not model.config.previous_token_rank:
            return self.drafter.project(state).expand(len(previous), -1)
        hidden = model.with_previous_token(state, model.previous_token_hidden(state), previous)
        return self.drafter.project(hidden)

    def _previous_token_scores(self, hidden: Tensor, candidates: Tensor, last: int) -> Tensor:
        """What the token before adds to the score of each candidate.

        Shapes: hidden [K, D], candidates [K, C] -> [K, C, C]: of slot i, after candidate j of slot
        i - 1 (of slot 0, after the last committed token in every line), candidate c.
        """
        model = self.model
        before = candidates.roll(1, dims=0)
        before[0] = last
        features = F.embedding(before, self.drafter.previous_token_features)
        gate = F.silu(model.previous_token_hidden(hidden)[:, None] + features)
        return gate @ F.embedding(candidates, self.drafter.previous_token_rows).transpose(1, 2)

    def likeliest(
        self, hidden: Tensor, last: int, count: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of every slot at once, and their log-probabilities.

        With previous-token features they are the likeliest without the token before, and that token
        moves probability among them only: all others keep their scores. Shapes: hidden [K, D] ->
        tokens [K, C], log-probabilities [K, C, C] as in `_previous_token_scores`; [K, 1, C] without
        such features.
        """
        logits = self.drafter.project(hidden)
        logits = exact_enough(logits) / temperature
        total = logits.logsumexp(-1)
        scores, tokens = likeliest(logits, count)
        if not self.model.config.previous_token_rank:
            return tokens, (scores - total[:, None])[:, None]
        share = (scores.logsumexp(-1) - total).exp().clamp(max=1.0)
        others = total + torch.log1p(-share)
        after = scores[:, None] + self._previous_token_scores(hidden, tokens, last) / temperature
        totals = torch.logaddexp(after.logsumexp(-1), others[:, None])
        return tokens, after - totals[..., None]

    def _draw(self, hidden: Tensor, logits: Tensor, last: int, stop: StopPolicy) -> Proposal:
        featured = bool(self.model.config.previous_token_rank)
        candidates = self.drafter.candidates([hidden], [logits]) if featured else None
        states, known = hidden.unbind(), list(logits.unbind())
        drafted: list[Tensor] = []
        rows: list[Tensor] = []
        notes: dict[str, list[float]] = {}
        previous = torch.tensor([last], device=self.device)
        for depth in range(len(states)):
            if candidates is not None:
                [after], tokens = candidates.after(depth, previous), candidates.tokens[0, depth]
                known[depth] = known[depth].index_copy(0, tokens, after)
            state = DraftState(depth, known[: depth + 1], states, notes)
            if not stop.should_draft(state):
                break
            row = warp(known[depth], self.sampling)
            drafted.append(self.randomness.categorical(row[None]))
            previous = drafted[-1]
            rows.append(row)
        if not drafted:
            nothing = torch.empty(0, dtype=torch.long)
            return Proposal.chain(nothing, hidden=hidden)
        tokens, known = torch.cat(drafted).cpu(), known[: len(drafted)]
        return Proposal.chain(tokens, torch.stack(rows), hidden=hidden, logits=lambda: known)

    def _rows_along(
        self, hidden: Tensor, logits: Tensor, tokens: Sequence[int]
    ) -> Sequence[Tensor]:
        """The row of each slot after the token before it.

        tokens: the last committed one and the draft. Shapes: hidden [K, D], logits [K, V] -> [V]
        each, as many as the draft has tokens.
        """
        count = len(tokens) - 1
        previous = torch.tensor(tokens[:-1], dtype=torch.long, device=self.device)
        return rows_after(self.model, hidden[:count], previous, logits[:count]).unbind()


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def open_drafter(model: SpecDrafter, target: PreTrainedModel | None) -> BlockDrafter:
    """What the kind's row opens it with."""
    return BlockDrafter(model)
