"""Plays methods on prompts, with rows of greedy targets and of reviewers looked up.

The production loop with the production drafters: what a method drafts and what is accepted is what
decoding would show. In greedy decoding all methods commit the same tokens, so the target is called
for the first of them only; language models of a cascade are called for new rows only. Sampled trees
are played with the target itself: outputs differ, so few rows are met again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from drafttrain.build.method import Method, build_method, build_sampling
from drafttrain.build.pairs import Pair
from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import KINDS
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import Output
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.played.recorded_model import Record, RecordedModel
from drafttrain.evaluation.prompts import Prompt


class Player:
    """Decodes prompts with any method of a pair; random choices depend on seed and row alone."""

    def __init__(self, target: CachedModel, pair: Pair, sampling: SamplingConfig) -> None:
        self.target, self.pair, self.config = target, pair, sampling
        self.sampling = build_sampling(sampling)
        self.strict = self.sampling.greedy and not target.processors(self.sampling).change_logits
        self.recorded = RecordedModel(target, skip_rejected=self.strict)
        self._models: dict[int, RecordedModel] = {}
        """By the identity of the model that is wrapped."""
        self.reviewed = recorded_pair(pair, self._record)
        self.strictly_reviewed = recorded_pair(
            pair, lambda model: self._record(model).skipping_rejected()
        )
        self._methods: dict[Played, Method] = {}

    @property
    def records(self) -> list[Record]:
        """What was asked of each recorded model and made, the target first."""
        return [self.recorded.record, *(model.record for model in self._models.values())]

    def play(self, prompt: Prompt, candidates: Sequence[Played]) -> list[Output]:
        """What each candidate does with a prompt; rows are forgotten afterwards."""
        outputs = [self.decode(prompt, candidate) for candidate in candidates]
        for record in self.records:
            record.sources.clear()
        return outputs

    def decode(self, prompt: Prompt, candidate: Played) -> Output:
        """What a candidate does with a prompt; rows are kept."""
        if candidate not in self._methods:
            self._methods[candidate] = build_method(candidate.decode, self._pair_of(candidate))
        method = self._methods[candidate]
        return Decoder(
            self._target_of(method.drafter),
            method.drafter,
            method.stop,
            method.verifier,
            self.sampling,
            lambda _: sequence_randomness(self.config.seed, prompt.row, self.target.device),
        ).decode_all([prompt.source], self.config.max_new_tokens)[0]

    def _record(self, model: CachedModel) -> RecordedModel:
        return self._models.setdefault(id(model), RecordedModel(model))

    def _pair_of(self, candidate: Played) -> Pair:
        """Only what reviews is recorded: a tree's own rows are hardly met again."""
        cascade = candidate.decode.cascade
        if cascade is None:
            return self.pair
        strict = self.sampling.greedy and cascade.leniency == 1.0
        return self.strictly_reviewed if strict else self.reviewed

    def _target_of(self, drafter: Drafter) -> CachedModel | RecordedModel:
        """The recorded one, where it has all that the drafter reads and the verifier judges."""
        if set(drafter.requires.layers) - {-1} or (drafter.branches and not self.strict):
            return self.target
        return self.recorded


def recorded_pair(pair: Pair, record: Callable[[CachedModel], RecordedModel]) -> Pair:
    """The pair with what `record` makes of its drafting language models."""
    recorded = partial(_recorded, record=record)
    companions = {name: recorded(drafter) for name, drafter in pair.companions.items()}
    return replace(pair, drafter=recorded(pair.drafter), companions=companions)


def _recorded(drafter: Drafter, record: Callable[[CachedModel], RecordedModel]) -> Drafter:
    kind = KINDS.get(drafter.name)
    if kind is None or not kind.is_language_model:
        return drafter
    return CausalDrafter(record(drafter.model))
