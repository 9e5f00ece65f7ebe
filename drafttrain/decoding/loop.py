"""The one loop: rounds of drafting, scoring and verifying, for every drafter and every rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from drafttrain.decoding.engine.cached_model import CachedModel, StepOutput
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.stopping import Capped
from drafttrain.decoding.types import (
    Drafter,
    Output,
    Proposal,
    Randomness,
    Round,
    Sampling,
    Source,
    StopPolicy,
    TargetState,
    Verdict,
    Verifier,
)
from drafttrain.decoding.verifiers import check_pairing

NOTHING = Proposal.empty()


@dataclass(frozen=True)
class Decoder:
    """A target and the triple that decodes it: drafter, stop policy, verifier."""

    target: CachedModel
    drafter: Drafter
    stop: StopPolicy
    verifier: Verifier
    sampling: Sampling
    randomness: Randomness

    def decode(
        self, sources: Sequence[Source], max_new_tokens: int, batch_size: int = 1
    ) -> Iterator[Round]:
        """Decode every source, yielding each round as it is done.

        Sequences run in groups of batch_size, whose rounds interleave. Raises ValueError at once,
        before any model runs, for a verifier that does not fit the drafter or the sampling, for
        settings of the target that cannot be honoured, and for draft trees where the target's
        attention cannot be given a mask.
        """
        if max_new_tokens < 1 or batch_size < 1:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} and batch_size={batch_size} must be at least 1"
            )
        check_pairing(self.drafter, self.stop, self.verifier, self.sampling)
        if self.drafter.branches:
            self.target.check_branches()
        processors = self.target.processors(self.sampling)
        return _decode_groups(self, processors, sources, max_new_tokens, batch_size)

    def decode_all(
        self, sources: Sequence[Source], max_new_tokens: int, batch_size: int = 1
    ) -> list[Output]:
        """Decode every source; one Output each, in order. Errors as in `decode`.

        Output.seconds counts from the start of the sequence's group to its own end.
        """
        outputs = [Output() for _ in sources]
        done, started = 0, perf_counter()
        for played in self.decode(sources, max_new_tokens, batch_size):
            output = outputs[played.sequence]
            output.tokens.extend(played.emitted)
            output.rounds.append(played)
            if played.finished:
                now = perf_counter()
                output.seconds = now - started
                done += 1
                if done % batch_size == 0:  # the next group starts
                    started = now
        return outputs


class RunningSequence:
    """One sequence under way: its committed tokens, its drafting session, the target's state."""

    def __init__(
        self,
        decoder: Decoder,
        processors: TargetProcessors,
        index: int,
        source: Source,
        max_new_tokens: int,
    ) -> None:
        target = decoder.target
        self.index = index
        self.remaining = target.max_new_tokens(source, max_new_tokens)
        self.process = processors.start(source, self.remaining)
        self.state = target.encode(source)
        self.draft = decoder.drafter.start(source, decoder.sampling, decoder.randomness)
        self.target_state: TargetState | None = None
        self._length = len(source.prefix)
        self._tokens = source.prefix.new_empty(self._length + self.remaining)
        self._tokens[: self._length] = source.prefix

    @property
    def tokens(self) -> Tensor:
        """[T] all committed tokens, the decoder prefix included."""
        return self._tokens[: self._length]

    def propose(self, stop: StopPolicy) -> Proposal:
        """A draft that leaves room for the one token that follows it."""
        limit = self.remaining - 1
        if limit == 0:
            return NOTHING
        proposal = self.draft.propose(self.tokens, self.target_state, Capped(stop, limit))
        if len(proposal.tokens) > limit and proposal.depth > limit:
            raise ValueError(
                f"the drafter proposed {proposal.depth} tokens in a row where {limit} were "
                "admitted; it must ask stop.should_draft before each token"
            )
        return proposal

    def commit(
        self, drafted: list[int], verdict: Verdict, score: StepOutput, ends: frozenset[int]
    ) -> list[int]:
        """Append the accepted path and the next token, up to the first EOS; what was appended."""
        path = verdict.path.tolist()
        emitted = [drafted[node] for node in path] + [verdict.next_token]
        for i, token in enumerate(emitted):
            if token in ends:
                emitted = emitted[: i + 1]
                self.remaining = len(emitted)
                break
        new_length = self._length + len(emitted)
        self._tokens[self._length : new_length] = torch.tensor(emitted)
        self._length = new_length
        self.remaining -= len(emitted)
        last = score.hidden[path[-1] + 1 if path else 0]
        self.target_state = TargetState(last, self._length)
        return emitted


@torch.inference_mode()
def play_round(decoder: Decoder, active: Sequence[RunningSequence]) -> list[Round]:
    """One round of every active sequence: draft, score in shared calls, verify, commit."""
    target, verifier = decoder.target, decoder.verifier
    proposals, draft_seconds = [], []
    for sequence in active:
        began = perf_counter()
        proposals.append(sequence.propose(decoder.stop))
        draft_seconds.append(perf_counter() - began)
    began = perf_counter()
    scores = target.score(
        [sequence.state for sequence in active],
        [sequence.tokens for sequence in active],
        proposals,
    )
    shared_seconds = (perf_counter() - began) / len(active)
    rounds = []
    for i, (sequence, proposal, score) in enumerate(zip(active, proposals, scores, strict=True)):
        began = perf_counter()
        logits = sequence.process(sequence.tokens, proposal.tokens, score.logits, proposal.parents)
        verdict = verifier.verify(proposal, logits, decoder.sampling, decoder.randomness)
        target.keep(sequence.state, verdict.path)
        drafted = proposal.tokens.tolist()
        emitted = sequence.commit(drafted, verdict, score, target.eos_ids)
        rounds.append(
            Round(
                sequence=sequence.index,
                drafted=drafted,
                path=verdict.path.tolist(),
                emitted=emitted,
                depth=proposal.depth if decoder.drafter.branches else None,
                expected=proposal.expected,
                passes=proposal.passes,
                calls=proposal.calls,
                draft_seconds=draft_seconds[i],
                target_seconds=shared_seconds + perf_counter() - began,
                finished=sequence.remaining == 0,
            )
        )
    return rounds


def _decode_groups(
    decoder: Decoder,
    processors: TargetProcessors,
    sources: Sequence[Source],
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[Round]:
    for first in range(0, len(sources), batch_size):
        group = range(first, min(first + batch_size, len(sources)))
        with torch.inference_mode():
            active = [
                RunningSequence(decoder, processors, i, sources[i], max_new_tokens) for i in group
            ]
        while active:
            yield from play_round(decoder, active)
            active = [sequence for sequence in active if sequence.remaining > 0]
