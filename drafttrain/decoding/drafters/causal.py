"""An ordinary language model as a drafter: a chain of tokens, one per forward pass.

Speculative sampling (Leviathan et al. 2023; Chen et al. 2023). Greedy decoding proposes the
drafter's arg-max. Under sampling, tokens are drawn from its distributions, warped like the
target's. A decoder-only model continues the same prompt; an encoder-decoder model encodes the
source itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.batching import BatchedCall, BatchedSteps, arg_max_of_each
from drafttrain.decoding.drafters.slots import longest_draft
from drafttrain.decoding.drafters.teacher_forced import NOT_DRAFTED, KnownOutput
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import source_for_model
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy
from drafttrain.decoding.sampling import at_least_float32, probs_of_tokens, warp
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import DraftState, Proposal, Sampling, Source, SourceTooLong
from drafttrain.models.draft_states import drawn_state
from drafttrain.models.draftable import draftable_tokens


class DrafterSequence:
    """A language model's view of the sequence that it drafts for: its state and its own prefix.

    An encoder-decoder drafter encodes the source itself, and replaces the target's decoder start
    token by its own.
    """

    def __init__(self, model: CachedModel, source: Source) -> None:
        most = model.source_limit
        if most is not None and source.is_text and len(source.input_ids) > most:
            raise SourceTooLong(
                f"the source has {len(source.input_ids)} tokens but the drafter takes {most}"
            )
        self._model, self._source = model, source_for_model(source, model.model)
        self._prefix, self._replaced = self._source.prefix.cpu(), len(source.prefix)
        self.state: SequenceState | None = None

    def begin(self) -> BatchedSteps[SequenceState]:
        """Returns the state of the sequence; encodes the source at the first call."""
        if self.state is None:
            self.state = yield BatchedCall(self._model.encode_all, self._source)
        return self.state

    def tokens(self, committed: Tensor) -> Tensor:
        """Returns the committed tokens with this model's own prefix. Shapes: [T] -> [T]."""
        return torch.cat((self._prefix, committed[self._replaced :]))

    def longest(self, committed: Tensor, most: int) -> int:
        """Most tokens to draft after the committed tokens [T], `most` or fewer."""
        own = len(self._prefix) - self._replaced + len(committed)
        return longest_draft(most, self._model.position_limit, own)


class CausalSession:
    """One sequence: the drafter's KV cache of the committed tokens and of its own drafts.

    After a round the cache still holds the draft. The next round keeps the accepted tokens and
    computes the missing ones.
    """

    def __init__(
        self, drafter: CausalDrafter, source: Source, sampling: Sampling, randomness: Randomness
    ) -> None:
        self.model, self.sequence = drafter.model, DrafterSequence(drafter.model, source)
        self.sampling, self.randomness = sampling, randomness

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> BatchedSteps[Proposal]:
        longest = self.sequence.longest(tokens, stop.longest)
        if longest == 0 or not stop.should_draft(DraftState(0)):
            return Proposal.empty()
        ends, state = self.model.eos_ids, (yield from self.sequence.begin())
        drafted: list[int] = []
        probs: list[Tensor] = []
        logits: list[Tensor] = []
        states: list[Tensor] = []
        notes: dict[str, list[float]] = {}
        missing = state.align(self.sequence.tokens(tokens))
        request = ForwardRequest(state, missing, logits_to_keep=1)
        while True:
            score = yield BatchedCall(self.model.forward_batch, request)
            row = score.logits[-1]
            if drafted and stop.state_kind == "token":
                states.append(score.hidden[-1])
            token = yield from self._choose(row, probs)
            logits.append(row)
            drafted.append(token)
            depth = len(drafted)
            if depth == longest or token in ends:
                break
            if stop.state_kind == "drawn":
                states.append(drawn_state(score.hidden[-1], row, token))
            if not stop.should_draft(DraftState(depth, logits, states, notes=notes)):
                break
            request = ForwardRequest(state, [token], logits_to_keep=1)
        return Proposal.chain(
            torch.tensor(drafted),
            torch.cat(probs) if probs else None,
            passes=len(drafted),
            logits=lambda: logits,
        )

    def _choose(self, row: Tensor, probs: list[Tensor]) -> BatchedSteps[int]:
        """Chooses the next draft token; appends the distribution it is drawn from to `probs`.
        Shapes: row [V]."""
        if self.sampling.greedy:
            [token] = yield BatchedCall(arg_max_of_each, row[None])
            return token
        probs.append(warp(row[None], self.sampling))
        return int(self.randomness.categorical(probs[-1]))


class CausalDrafter(Drafter):
    """Drafts chains with a language model, decoder-only or encoder-decoder."""

    name = "causal"
    session = CausalSession

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.vocabulary, self.eos_ids = model.vocabulary, model.eos_ids

    @classmethod
    def of(cls, model: PreTrainedModel, target: PreTrainedModel | None) -> Self:
        """Builds a drafter with a score for each token of the target, or of its own vocabulary if
        there is no target."""
        size = None if target is None else target.get_output_embeddings().out_features
        draftable = draftable_tokens(model.config, model.get_output_embeddings().out_features)
        return cls(CachedModel(model, draftable, size))


@torch.inference_mode()
def teacher_forced_rows(model: CachedModel, source: Source, target_ids: Tensor) -> Tensor:
    """Computes the drafter's logits at each prefix of a known output, in one forward pass.

    Row i follows the first i tokens of the output. source: as read by the target. Rows end at the
    drafter's last position. Shapes: [L] -> [M, V], M <= L; before warping, float32 at least.
    """
    source = source_for_model(source, model.model)
    inputs = target_ids[:-1].to(source.prefix.device)
    if model.position_limit is not None:
        inputs = inputs[: max(model.position_limit - len(source.prefix), 0)]
    ids = torch.cat((source.prefix, inputs)).tolist()
    [output] = model.forward_batch([ForwardRequest(model.encode(source), ids, len(inputs) + 1)])
    return at_least_float32(output.logits[: len(target_ids)])


def teacher_forced_probs(
    drafter: CausalDrafter, known: KnownOutput, longest: Sequence[int], sampling: Sampling
) -> Tensor:
    """Probabilities of the output's own tokens (`drafters/teacher_forced.py`), from one forward
    pass over the output: each row depends only on the tokens before it."""
    rows, length = teacher_forced_rows(drafter.model, known.source, known.tokens), len(known.tokens)
    probs = probs_of_tokens(rows, known.tokens[: len(rows)], sampling)
    known_probs = F.pad(probs, (0, length - len(probs)), value=NOT_DRAFTED)
    # row p of the sliding windows holds the probabilities of the output's tokens p..p+K-1
    return F.pad(known_probs, (0, max(longest) - 1)).unfold(0, max(longest), 1)


def greedy_blocks(best: Tensor, length: int, k: int) -> Tensor:
    """Greedy drafts at each prefix of an output, correct up to their first rejected token.

    No token is accepted after a rejection, so the arg-max along the output itself is enough to
    count acceptance; -1 marks tokens past the last row. Shapes: best [M], the arg-max after the
    first i tokens of the output, M <= length -> [length, k].
    """
    return F.pad(best.cpu(), (0, length - len(best) + k - 1), value=-1).unfold(0, k, 1)
