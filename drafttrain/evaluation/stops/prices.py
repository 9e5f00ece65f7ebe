"""What a policy, a tree or a cascade costs, from what calls cost on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.played.costs import MethodCosts
from drafttrain.evaluation.stops.replay import OF_ROWS, Candidate, PolicyCounts
from drafttrain.evaluation.stops.round_costs import RoundCosts
from drafttrain.evaluation.stops.waves import seconds_of_wave

AnyCandidate = Candidate | Played


@dataclass(frozen=True)
class RuleCost:
    """Seconds that a rule of verification takes more than token-by-token rejection."""

    call: float = 0.0
    token: float = 0.0
    """A drafted token."""


@dataclass(frozen=True)
class Prices:
    """Seconds of everything that a policy spends."""

    rounds: Mapping[int, RoundCosts]
    """By batch size."""
    heads: dict[str, float] = field(default_factory=dict)
    """What each head takes to judge a token."""
    entropy: float = 0.0
    """What policies that go by rows take for one: the entropy policy's time."""
    rules: dict[str, RuleCost] = field(default_factory=dict)
    """Those of rules other than rejection."""
    methods: Mapping[tuple[str, int], MethodCosts] = field(default_factory=dict)
    """Of what is played, by its way and the batch size."""

    def seconds(
        self, counts: PolicyCounts, place: int, candidate: AnyCandidate, batch_size: int = 1
    ) -> Array:
        """Predicted seconds of each prompt under a candidate: its rounds by their counts, a
        policy's own time, the rule's, and what a sequence takes beside them. [P]."""
        if isinstance(candidate, Played):
            return self.methods[candidate.way, batch_size].seconds(counts, place)
        costs, rule = self.rounds[batch_size], self.rules.get(candidate.verifier, RuleCost())
        computed, judged, others = counts.by_computed, counts.by_rows, batch_size - 1
        reads, read = counts.drafter_history[:, place], counts.history[:, place]
        drafting = costs.draft.total(computed[:, place], reads, others)
        judging = costs.target.total(judged[:, place], read, others)
        ruling = rule.call * counts.rounds[:, place] + rule.token * counts.drafted[:, place]
        policy = self.judging(candidate) * counts.judged[:, place]
        return drafting + judging + ruling + policy + costs.constant * counts.sequences[:, place]

    def list_seconds(
        self,
        counts: PolicyCounts,
        place: int,
        candidate: AnyCandidate,
        batch_size: int,
        waves: Sequence[Sequence[int]],
    ) -> float:
        """Predicted seconds of decoding these prompts once, in waves whose last batches are not
        full; where a prompt's outputs were played several times, of their mean."""
        sequences = counts.sequences[:, place]
        constants = {
            size: self.constant(candidate, size) for size in self.rounds if size <= batch_size
        }
        shares = {
            size: self.seconds(counts, place, candidate, size) / sequences - constant
            for size, constant in constants.items()
        }
        rounds = counts.rounds[:, place] / sequences
        known = sum(seconds_of_wave(shares, rounds, wave, batch_size) for wave in waves)
        return known + constants[batch_size] * len(sequences)

    def constant(self, candidate: AnyCandidate, batch_size: int) -> float:
        """Seconds of a sequence beside its rounds."""
        if isinstance(candidate, Played):
            return self.methods[candidate.way, batch_size].constant
        return self.rounds[batch_size].constant

    def plain_list_seconds(
        self, tokens: Array, before: Array, batch_size: int, waves: Sequence[Sequence[int]]
    ) -> float:
        """The same of plain decoding: a round a token, with so many tokens in front of them.

        Shapes: tokens [P], before [P].
        """
        read = tokens * before + tokens * (tokens - 1.0) / 2.0
        by_rows = np.stack([np.zeros_like(tokens), tokens], axis=-1)
        shares = {
            size: costs.target.total(by_rows, read)
            for size, costs in self.rounds.items()
            if size <= batch_size
        }
        known = sum(seconds_of_wave(shares, tokens, wave, batch_size) for wave in waves)
        return known + self.rounds[batch_size].constant * len(tokens)

    def judging(self, candidate: Candidate) -> float:
        """Seconds that the policy itself takes for a token."""
        if candidate.head is not None:
            return self.heads[candidate.head]
        return self.entropy if candidate.kind in OF_ROWS else 0.0
