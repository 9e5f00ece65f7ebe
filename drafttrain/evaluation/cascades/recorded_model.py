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
    committed: int = 0
    """Tokens in front of the draft that was scored last."""

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
    """The part of `CachedModel` that chains need, with rows looked up where they are known.

    Every row of a source is held ([V] and [D], in the types that the model gives) until `forget`.
    skip_rejected: greedy reviews read no row behind a token that is not the arg-max of the row
    before it, so such rows are not computed, and are zeros. Right only where a draft's token is
    accepted just if it is that arg-max: no leniency, no logits processors.
    """

    def __init__(
        self, model: CachedModel, skip_rejected: bool = False, record: Record | None = None
    ) -> None:
        self.wrapped, self.skip_rejected = model, skip_rejected
        self.record = Record() if record is None else record
        self.model, self.device, self.eos_ids = model.model, model.device, model.eos_ids
        self.is_encoder_decoder = model.is_encoder_decoder
        self.requires = model.requires
        self.source_limit, self.position_limit = model.source_limit, model.position_limit

    @property
    def vocabulary(self) -> int:
        """Tokens that it gives logits for."""
        return self.wrapped.vocabulary

    def skipping_rejected(self) -> RecordedModel:
        """The same rows, for greedy reviews without leniency."""
        return RecordedModel(self.wrapped, True, self.record)

    def forget(self) -> None:
        """Drop all rows; sequences under way must not go on."""
        self.record.sources.clear()

    def check_branches(self) -> None:
        """Raise ValueError: rows are those of chains."""
        raise ValueError("recorded models look up chains, not draft trees; draft chains")

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
        """Rows of each sequence's chain, N + 1 each, with last hidden states of these alone.

        Raises ValueError for trees, and for drafters that read other layers.
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
            state.committed = len(committed)
            self._follow(state, committed.tolist() + proposal.tokens.tolist())
            scores.append(self._rows(state, state.committed - 1, self.skip_rejected))
        return scores

    def keep(self, state: RecordedState, path: Tensor) -> None:
        """Keep the committed tokens and the accepted beginning of the last draft."""
        kept = state.committed + len(path)
        del state.tokens[kept:], state.places[kept:]

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

    def _rows(self, state: RecordedState, first: int, skip: bool = False) -> StepOutput:
        """Rows after the tokens from number `first` on."""
        self.record.asked += 1
        places, wanted = state.places, len(state.places)
        for row in range(first, wanted):
            if places[row].logits is None:
                self._compute(state, row)
            if skip and row + 1 < wanted and places[row].best != state.tokens[row + 1]:
                wanted = row + 1
                break
        logits = [place.logits for place in places[first:wanted]]
        hidden = [place.hidden for place in places[first:wanted]]
        unread = len(places) - wanted
        logits += [torch.zeros_like(logits[0])] * unread
        hidden += [torch.zeros_like(hidden[0])] * unread
        return StepOutput(torch.stack(logits), torch.stack(hidden))

    @torch.inference_mode()
    def _compute(self, state: RecordedState, row: int) -> None:
        """One call of the model: all rows from this one on."""
        before, behind = state.tokens[: row + 1], state.tokens[row + 1 :]
        [score] = self.wrapped.score(
            [state.recording.cache],
            [torch.tensor(before)],
            [Proposal.chain(torch.tensor(behind, dtype=torch.long))],
        )
        self.record.made += 1
        found = zip(
            state.places[row:],
            score.logits,
            score.hidden[-len(score.logits) :],
            score.logits.argmax(-1),
            strict=True,
        )
        for place, logits, hidden, best in found:
            if place.logits is None:  # of known places the first rows stay: one row a sequence
                place.logits, place.hidden, place.best = logits, hidden, int(best)
