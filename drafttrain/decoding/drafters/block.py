"""Spec-Drafter as a drafter: one pass drafts a whole block (SpecDec Equation 7).

Greedy decoding proposes the arg-max of every slot, a point mass. Under sampling each token is drawn
from its own slot's row: given the accepted prefix that is the distribution it follows, so rejection
sampling stays lossless. With previous-token features, slot i's row is computed from the token drawn
for slot i - 1 and is again just what the token is drawn from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.config.kinds import DrawKind, Evidence
from drafttrain.decoding.drafters.row_by_row import RowByRow
from drafttrain.decoding.roles import Randomness, StopPolicy
from drafttrain.decoding.sampling import exact_enough, warp
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source
from drafttrain.models.layout import column_major, store_column_major
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.slots import lay_out

CANDIDATES = 64
"""Tokens a slot that are scored again with the token before them; all others keep their scores."""


class BlockDrafter:
    """Drafts blocks of slots with a trained Spec-Drafter."""

    name = "spec-drafter"
    provides: frozenset[Evidence] = frozenset({"logits", "hidden"})
    requires = TargetRequirements()
    branches = False

    def __init__(self, model: SpecDrafter):
        self.model = model.eval()
        store_column_major(model)
        with torch.inference_mode():
            self.output_weight = column_major(model.output_weight())
            if (
                model.config.previous_token_rank
            ):  # tables, so that a pair of tokens is quickly scored
                every = torch.arange(model.config.embedding_rows, device=self.output_weight.device)
                self.previous_token_features, self.previous_token_rows = (
                    model.previous_token_features(every),
                    model.previous_token_rows(),
                )

        ends = model.config.eos_token_id
        self.eos_ids = frozenset([] if ends is None else [ends] if isinstance(ends, int) else ends)
        """Tokens that end a sequence."""

    def project(self, hidden: Tensor) -> Tensor:
        """Scores of every token. Shapes: [..., D] -> [..., V]."""
        return self.model.project(hidden, self.output_weight)

    @property
    def vocabulary(self) -> int:
        """Tokens that it can draft."""
        return self.model.config.vocab_size

    def draw_kind(self, sampling: Sampling) -> DrawKind:
        return "deterministic" if sampling.greedy else "iid"

    def start(self, sampling: Sampling) -> RowByRow:
        return RowByRow(self, sampling)

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> BlockSession:
        return BlockSession(self, source, sampling, randomness)


class BlockSession:
    """One sequence: the encoded source and, with a causal prefix, its keys and values."""

    @torch.inference_mode()
    def __init__(
        self, drafter: BlockDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ):
        model = drafter.model
        self.drafter, self.model, self.sampling, self.randomness = (
            drafter,
            model,
            sampling,
            randomness,
        )
        self.candidates = min(CANDIDATES, model.config.vocab_size)
        self.anchored = model.config.slots == "anchored"
        self.causal = model.config.prefix_attention == "causal"
        self.skipped = len(source.prefix) if not self.anchored else 0  # paper slots: no start token
        self.device = model.embedding.weight.device
        self.memory = model.encode(source.input_ids[None].to(self.device))
        self.past: list[tuple[Tensor, Tensor]] | None = None
        self.known = source.prefix[:0].to(self.device)
        """Tokens whose keys and values are cached."""

    @torch.inference_mode()
    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        slots = stop.longest
        if slots == 0:
            return Proposal.empty()
        hidden = self.slot_states(tokens, slots)
        last = int(tokens[-1])
        if not self.sampling.greedy:
            return self._draw(hidden, last, stop)
        drafted = self._arg_max(hidden, last, stop)
        return Proposal.chain(torch.tensor(drafted, dtype=torch.long), hidden=hidden)

    def slot_states(self, tokens: Tensor, slots: int) -> Tensor:
        """Hidden states that predict what follows all committed tokens; caches the prefix.

        Before previous-token features. Shapes: tokens [T] -> [slots, D].
        """
        prefix = tokens.to(self.device)[self.skipped :]
        cached = self._forget_what_differs(prefix)
        fresh = prefix[cached:]
        masks = slots - 1 if self.anchored else slots
        count = len(fresh)
        rows = torch.cat((fresh, fresh.new_full((masks,), self.model.config.mask_id)))
        positions = torch.arange(cached, cached + len(rows), device=self.device)
        visible = None
        if self.causal and count > 0:  # fresh prefix rows see earlier rows only, masks see all
            total = cached + len(rows)
            places = torch.arange(total, device=self.device)
            limit = torch.where(positions < len(prefix), positions, total)
            visible = (places <= limit[:, None])[None, None]
        hidden, new = self.model.decode(
            rows[None], positions[None], visible, self.memory, self.past
        )
        if self.causal:
            self._remember(new, fresh)
        return hidden[0, len(rows) - slots :]

    def slot_logits(self, state: Tensor, previous: Tensor) -> Tensor:
        """Rows of one slot, each after another token. Shapes: state [D], previous [F] -> [F, V].

        Without previous-token features the token before makes no difference.
        """
        model, previous = self.model, previous.to(self.device)
        if not model.config.previous_token_rank:
            return self.drafter.project(state).expand(len(previous), -1)
        hidden = model.with_previous_token(state, model.previous_token_hidden(state), previous)
        return self.drafter.project(hidden)

    def _forget_what_differs(self, prefix: Tensor) -> int:
        """Keep of the cache what it has in common with these tokens; how many they are.

        Anchored slots start at the last committed token, so that its row is wanted in any case.
        """
        shared = min(len(self.known), len(prefix) - 1 if self.anchored else len(prefix))
        if torch.equal(self.known[:shared], prefix[:shared]) and shared == len(self.known):
            return shared
        differs = (self.known[:shared] != prefix[:shared]).nonzero()
        if len(differs):
            shared = int(differs[0])
        self.known = self.known[:shared]
        if self.past is not None:
            self.past = [(k[:, :, :shared], v[:, :, :shared]) for k, v in self.past]
        return shared

    def _remember(self, new: list[tuple[Tensor, Tensor]], fresh: Tensor) -> None:
        count = len(fresh)
        kept = [(key[:, :, :count], value[:, :, :count]) for key, value in new]
        if self.past is None:
            self.past = kept
        else:
            self.past = [
                (torch.cat((old[0], now[0]), 2), torch.cat((old[1], now[1]), 2))
                for old, now in zip(self.past, kept, strict=True)
            ]
        self.known = torch.cat((self.known, fresh))

    def _arg_max(self, hidden: Tensor, last: int, stop: StopPolicy) -> list[int]:
        model = self.model
        if not model.config.previous_token_rank:
            logits = self.drafter.project(hidden)
            return logits.argmax(-1).tolist()[: slots_to_draft(stop, logits, hidden)]
        return self._arg_max_left_to_right(hidden, last, stop)

    def _arg_max_left_to_right(self, hidden: Tensor, last: int, stop: StopPolicy) -> list[int]:
        """Left to right over the slots, among the best candidates of each slot alone."""
        logits = self.drafter.project(hidden)
        after = self._candidates_after(hidden, logits)
        drafted = [torch.tensor(last, device=self.device)]
        for slot in range(slots_to_draft(stop, logits, hidden)):
            candidates, scores = after(slot, drafted[-1])
            drafted.append(candidates[scores.argmax()])
        return torch.stack(drafted).tolist()[1:]

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
        scores, tokens = logits.topk(min(count, logits.shape[-1]), dim=-1)
        if not self.model.config.previous_token_rank:
            return tokens, (scores - total[:, None])[:, None]
        share = (scores.logsumexp(-1) - total).exp().clamp(max=1.0)
        others = total + torch.log1p(-share)
        after = scores[:, None] + self._previous_token_scores(hidden, tokens, last) / temperature
        totals = torch.logaddexp(after.logsumexp(-1), others[:, None])
        return tokens, after - totals[..., None]

    def _draw(self, hidden: Tensor, last: int, stop: StopPolicy) -> Proposal:
        logits = self.drafter.project(hidden)
        featured = bool(self.model.config.previous_token_rank)
        after = self._candidates_after(hidden, logits) if featured else None
        states, known = hidden.unbind(), list(logits.unbind())
        drafted: list[Tensor] = []
        rows: list[Tensor] = []
        notes: dict[str, list[float]] = {}
        previous = torch.tensor(last, device=self.device)
        for depth in range(len(states)):
            if after is not None:
                known[depth] = known[depth].index_copy(0, *after(depth, previous))
            state = DraftState(depth, known[: depth + 1], states, notes)
            if not stop.should_draft(state):
                break
            row = warp(known[depth], self.sampling)
            previous = self.randomness.categorical(row[None])[0]
            drafted.append(previous)
            rows.append(row)
        if not drafted:
            nothing = torch.empty(0, dtype=torch.long)
            return Proposal.chain(nothing, hidden=hidden)
        return Proposal.chain(torch.stack(drafted).cpu(), torch.stack(rows), hidden=hidden)

    def _candidates_after(
        self, hidden: Tensor, logits: Tensor
    ) -> Callable[[int, Tensor], tuple[Tensor, Tensor]]:
        """A function of a slot and the token before: the slot's candidates, and their scores then.

        They are the best of the slot alone; scoring them takes a small part of a projection's time.
        Shapes: hidden [K, D], logits [K, V], -> two [C].
        """
        scores, candidates = logits.topk(self.candidates, dim=-1)
        directions = F.embedding(candidates, self.drafter.previous_token_rows)  # [K, C, rank]
        from_hidden = self.model.previous_token_hidden(hidden)

        def after(slot: int, previous: Tensor) -> tuple[Tensor, Tensor]:
            gate = F.silu(from_hidden[slot] + self.drafter.previous_token_features[previous])
            return candidates[slot], torch.addmv(scores[slot], directions[slot], gate)

        return after


def slots_to_draft(stop: StopPolicy, logits: Tensor, hidden: Tensor | None = None) -> int:
    """How many slots of a block a stop policy drafts. Shapes: logits [K, V], hidden [K, D]."""
    rows, states = logits.unbind(), () if hidden is None else hidden.unbind()
    notes: dict[str, list[float]] = {}
    for depth in range(len(rows)):
        if not stop.should_draft(DraftState(depth, rows[: depth + 1], states, notes)):
            return depth
    return len(rows)


@torch.inference_mode()
def predict_blocks(model: SpecDrafter, source_ids: Tensor, target_ids: Tensor) -> Tensor:
    """Greedy blocks at every prefix length 0..L-1 of a known output, in one pass.

    With previous-token features slot i is given y_{i-1}: a slot counts only where all earlier ones
    were right, so this is what decoding would have drafted there. Shapes: [S], [L] -> [L, k].
    """
    prefixes = range(len(target_ids))
    states, previous = block_states(model, source_ids, target_ids, prefixes, model.config.k)
    return rows_after(model, states, previous).argmax(-1).cpu()


def rows_after(model: SpecDrafter, states: Tensor, previous: Tensor) -> Tensor:
    """The rows of slots as decoding has them after these tokens.

    With previous-token features the token before changes the scores of a slot's best candidates,
    all others keep theirs. Shapes: states [..., D], previous [...] -> [..., V].
    """
    alone = model.project(states)
    if not model.config.previous_token_rank:
        return alone
    best = alone.topk(min(CANDIDATES, alone.shape[-1]), dim=-1).indices
    after = model.logits(states, previous)
    return alone.scatter(-1, best, after.gather(-1, best))


@torch.inference_mode()
def block_states(
    model: SpecDrafter, source_ids: Tensor, target_ids: Tensor, prefixes: Sequence[int], k: int
) -> tuple[Tensor, Tensor]:
    """The slots of blocks at some prefix lengths of a known output, in one pass.

    Hidden states before previous-token features, and the token of the output before each one
    predicted. Shapes: [S], [L], A prefix lengths in 0..L-1 -> [A, k, D], [A, k].
    """
    config, device = copy.copy(model.config), model.embedding.weight.device
    config.k = k
    starts = torch.tensor(prefixes)
    count, length = len(starts), len(target_ids)
    if config.prefix_attention == "bidirectional":
        starts = starts[:, None]
        sources, targets = source_ids.expand(count, -1), target_ids.expand(count, -1)
    else:
        starts = starts[None]
        sources, targets = source_ids[None], target_ids[None]
    lengths = torch.full((len(targets),), length)
    layout = lay_out(targets, lengths, starts, config).to(device)
    hidden = model(sources.to(device), None, layout.rows)
    previous = layout.previous
    states = layout.of_blocks(hidden).reshape(count, config.mask_rows, config.d_model)
    before = layout.of_blocks(previous).reshape(count, config.mask_rows)
    if config.slots == "anchored":
        first = starts[0].to(device)  # the row of the last committed token is the first slot
        states = torch.cat((layout.of_prefix(hidden)[0, first][:, None], states), dim=1)
        before = torch.cat((layout.of_prefix(previous)[0, first][:, None], before), dim=1)
    return states, before


def open_drafter(model: SpecDrafter, target: PreTrainedModel | None) -> BlockDrafter:
    """What the kind's row opens it with."""
    return BlockDrafter(model)
