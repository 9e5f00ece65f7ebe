"""A model whose rows are computed once and then looked up, for decoding the same inputs again.

What a language model says after a sequence depends on that sequence alone, not on how drafts cut it
into calls. So the production loop with the production drafters can be run again with other draft
lengths, and only sequences that were not seen before cost a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.calls import StepOutput
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.one_by_one import OneByOne
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.types import Proposal, Sampling, Source


@dataclass
class Place:
    """A sequence of tokens: what the model says after it, and the sequences one token longer."""

    longer: dict[int, Place] = field(default_factory=dict)
    logits: Tensor | None = None
    """[V]; None: not computed yet."""
    hidden: Tensor | None = None
    """[D]."""
    best: int = -1
    """The arg-max of the logits."""


@dataclass
class Recording:
    """All that is known of one source, and the model's own cache of it."""

    cache: SequenceState
    root: Place = field(default_factory=Place)


@dataclass
class RecordedState:
    """One decoding of a source: where it stands. Each token has its place."""

    recording: Recording
    tokens: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    draft: list[tuple[int, Place]] = field(default_factory=list)
    """Tokens and places of the draft that was scored last."""

    @property
    def source(self) -> Source:
        """With the whole prefix."""
        return self.recording.cache.source

    @property
    def encoded(self) -> Tensor | None:
        """What the encoder put out."""
        return self.recording.cache.encoded

    def crossed(self, layer: int) -> Tensor | None:
        """Keys and values of cross-attention, as of `SequenceState`."""
        return self.recording.cache.crossed(layer)

    def prompt(self, layers: Iterable[int]) -> dict[int, Tensor]:
        """Keys and values of the prompt, as of `SequenceState`."""
        return self.recording.cache.prompt(layers)


@dataclass
class Record:
    """The rows of a model; views of it share them."""

    sources: dict[tuple[bytes, ...], Recording] = field(default_factory=dict)
    asked: int = 0
    """Calls of the model that decoding asked for."""
    made: int = 0
    """Those that were made."""


class RecordedModel(OneByOne):
    """The part of `CachedModel` that reviews need, with rows looked up where they are known.

    Every row of a source is held ([V] and [D], in the types that the model gives) until `forget`.
    skip_rejected: greedy reviews read no row behind a token that is not the arg-max of the row
    before it, so such rows are not computed, and are zeros. Right only where a draft's token is
    accepted just if it is that arg-max: no leniency, no logits processors. Trees are looked up
    only so: most of their rows are never met again.
    """

    def __init__(
        self, model: CachedModel, skip_rejected: bool = False, record: Record | None = None
    ) -> None:
        self.wrapped, self.skip_rejected = model, skip_rejected
        self.record = Record() if record is None else record
        self.model, self.device, self.eos_ids = model.model, model.device, model.eos_ids
        self.is_encoder_decoder = model.is_encoder_decoder
        self.requires, self.draftable = model.requires, model.draftable
        self.source_limit, self.position_limit = model.source_limit, model.position_limit

    @property
    def vocabulary(self) -> int:
        """Tokens that it knows."""
        return self.wrapped.vocabulary

    def skipping_rejected(self) -> RecordedModel:
        """The same rows, for greedy reviews without leniency."""
        return RecordedModel(self.wrapped, True, self.record)

    def forget(self) -> None:
        """Drop all rows; sequences under way must not go on."""
        self.record.sources.clear()

    def check_branches(self) -> None:
        """Raise ValueError where rows are those of chains."""
        if not self.skip_rejected:
            raise ValueError(
                "recorded models look up draft trees for greedy reviews only; draft chains"
            )
        self.wrapped.check_branches()

    def processors(self, sampling: Sampling) -> TargetProcessors:
        """The model's own logits processors, which are applied to looked-up rows too."""
        return self.wrapped.processors(sampling)

    def max_new_tokens(self, source: Source, wanted: int) -> int:
        """Tokens that can be generated: as many as wanted, within the decoder's positions."""
        return self.wrapped.max_new_tokens(source, wanted)

    def encode(self, source: Source) -> RecordedState:
        """A state with nothing fed; the source is encoded the first time. Errors as CachedModel."""
        key = tuple(value.cpu().numpy().tobytes() for value in source.inputs.values())
        if key not in self.record.sources:
            self.record.sources[key] = Recording(self.wrapped.encode(source))
        return RecordedState(self.record.sources[key])

    def catch_up(self, state: RecordedState, tokens: Tensor) -> StepOutput:
        """What follows these tokens. Shapes: tokens [T] -> logits [1, V], hidden [1, D]."""
        self._follow(state, tokens.tolist())
        return self._rows(state, first=len(state.tokens) - 1)

    def feed(self, state: RecordedState, tokens: Tensor) -> StepOutput:
        """Append a chain. Shapes: [N] -> logits [N, V], hidden [N, D]."""
        first = len(state.tokens)
        self._follow(state, state.tokens + tokens.tolist())
        return self._rows(state, first)

    def score(
        self,
        states: Sequence[RecordedState],
        tokens: Sequence[Tensor],
        proposals: Sequence[Proposal],
        layers: Sequence[int] = (),
    ) -> list[StepOutput]:
        """Rows of each sequence's draft, N + 1 each, with last hidden states of these alone.

        Raises ValueError for trees whose rows may all be read, and for drafters that read other
        layers.
        """
        if set(layers) - {-1}:
            raise ValueError(
                f"recorded models hold last hidden states, not those of layers {list(layers)}; "
                "leave the drafter that reads them out of the search"
            )
        scores = []
        for state, committed, proposal in zip(states, tokens, proposals, strict=True):
            if not proposal.is_chain:
                self.check_branches()
            self._follow(state, committed.tolist())
            state.draft = self._hang(state, proposal)
            scores.append(self._review(state, committed, proposal))
        return scores

    def keep(self, state: RecordedState, path: Tensor) -> None:
        """Keep the committed tokens and the accepted nodes of the last draft."""
        for node in path.tolist():
            token, place = state.draft[node]
            state.tokens.append(token)
            state.places.append(place)

    def _hang(self, state: RecordedState, proposal: Proposal) -> list[tuple[int, Place]]:
        """The place of every node of a draft behind the tokens that the state stands at."""
        nodes: list[tuple[int, Place]] = []
        for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
            above = state.places[-1] if parent < 0 else nodes[parent][1]
            nodes.append((token, above.longer.setdefault(token, Place())))
        return nodes

    def _review(self, state: RecordedState, committed: Tensor, proposal: Proposal) -> StepOutput:
        """The row of the last committed token and of every node that a review may come to."""
        self.record.asked += 1
        places = [state.places[-1], *(place for _, place in state.draft)]
        above = [0, *(parent + 1 for parent in proposal.parents.tolist())]
        read = [True] * len(places)
        for row, place in enumerate(places):
            if row and self.skip_rejected:
                token, _ = state.draft[row - 1]
                read[row] = read[above[row]] and places[above[row]].best == token
            if read[row] and place.logits is None:
                self._compute(state, committed, proposal, places)
        blank = torch.zeros_like(places[0].logits), torch.zeros_like(places[0].hidden)
        rows = [
            (place.logits, place.hidden) if seen else blank
            for place, seen in zip(places, read, strict=True)
        ]
        logits, hidden = (torch.stack(own) for own in zip(*rows, strict=True))
        return StepOutput(logits, hidden)

    def _follow(self, state: RecordedState, tokens: list[int]) -> None:
        """Go to the place of these tokens."""
        common = min(len(state.tokens), len(tokens))
        if state.tokens[:common] != tokens[:common]:
            pairs = zip(state.tokens, tokens, strict=False)
            common = next(i for i, (old, new) in enumerate(pairs) if old != new)
        del state.tokens[common:], state.places[common:]
        place = state.places[-1] if state.places else state.recording.root
        for token in tokens[common:]:
            place = place.longer.setdefault(token, Place())
            state.tokens.append(token)
            state.places.append(place)

    def _rows(self, state: RecordedState, first: int) -> StepOutput:
        """Rows after the tokens from number `first` on."""
        self.record.asked += 1
        for row in range(first, len(state.places)):
            if state.places[row].logits is None:
                chain = Proposal.chain(torch.tensor(state.tokens[row + 1 :], dtype=torch.long))
                before = torch.tensor(state.tokens[: row + 1])
                self._compute(state, before, chain, state.places[row:])
        places = state.places[first:]
        logits = torch.stack([place.logits for place in places])
        return StepOutput(logits, torch.stack([place.hidden for place in places]))

    @torch.inference_mode()
    def _compute(
        self, state: RecordedState, tokens: Tensor, draft: Proposal, places: Sequence[Place]
    ) -> None:
        """One call of the model: the rows of these places, the last token's and the draft's."""
        [score] = self.wrapped.score([state.recording.cache], [tokens], [draft])
        if not draft.is_chain:
            self.wrapped.keep(state.recording.cache, torch.arange(0))  # branches are in the way
        self.record.made += 1
        hidden = score.hidden[-len(score.logits) :]
        found = zip(places, score.logits, hidden, score.logits.argmax(-1), strict=True)
        for place, logits, hidden_row, best in found:
            if place.logits is None:  # of known places the first rows stay: one row a sequence
                place.logits, place.hidden, place.best = logits, hidden_row, int(best)
