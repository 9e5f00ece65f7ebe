"""The decoding loop: rounds of drafting, scoring and verifying, shared by all methods."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.decoding.batching import BatchedSteps, as_steps, run_batched, to_host
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.engine.requests import ForwardOutput
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.padding import cut_after_eos
from drafttrain.decoding.roles import Drafter, DraftSession, Randomness, StopPolicy, Verifier
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import (
    NO_TOKEN,
    NotFinite,
    Output,
    Proposal,
    Round,
    Sampling,
    Source,
    SourceTooLong,
    Verdict,
)
from drafttrain.decoding.verifiers import check_pairing, verify_greedy

NO_DRAFT = Proposal.empty()


@dataclass(frozen=True)
class Decoder:
    """A target and the triple that decodes it: drafter, stop policy, verifier."""

    target: CachedModel
    drafter: Drafter
    stop: StopPolicy
    verifier: Verifier
    sampling: Sampling
    randomness: Callable[[int], Randomness]
    """Returns the random source of sequence number i; every sequence has its own."""

    def decode(
        self, sources: Iterable[Source], max_new_tokens: int, batch_size: int = 1
    ) -> Iterator[Round]:
        """Decodes every source and yields each round when it is done.

        At most batch_size sequences are active; when one ends, the next one enters. Raises
        ValueError immediately, before any model runs, for a pairing that `check_pairing` refuses,
        unsupported settings in the target's generation_config, and trees without tree attention.
        """
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name} = {value!r}; give an integer of at least 1")
        check_pairing(self.drafter, self.stop.rule, self.verifier.rule, self.sampling)
        if self.drafter.drafts_trees:
            self.target.check_tree_attention()
        _ = self.processors  # refuses settings now, not in the first round
        return _rounds(self, sources, max_new_tokens, batch_size)

    @cached_property
    def processors(self) -> TargetProcessors:
        """The logits processors of the target's `generation_config`. Building them takes as long as
        one or two rounds of a small model."""
        return self.target.processors(self.sampling)

    def decode_all(
        self, sources: Sequence[Source], max_new_tokens: int, batch_size: int = 1
    ) -> list[Output]:
        """Decodes every source and returns one Output each, in order. Raises as `decode` does.

        Output.seconds is the time from when the sequence entered the batch until it ended.
        """
        outputs = [Output() for _ in sources]
        entered = [perf_counter()] * min(batch_size, len(sources))
        for round_ in self.decode(sources, max_new_tokens, batch_size):
            output = outputs[round_.sequence]
            output.tokens.extend(round_.emitted)
            output.rounds.append(round_)
            if round_.finished:
                now = perf_counter()
                output.seconds = now - entered[round_.sequence]
                entered.append(now)  # the next sequence in order, if any, enters now
        return outputs


class RunningSequence:
    """One active sequence: its committed tokens, draft session and target cache."""

    def __init__(
        self, decoder: Decoder, index: int, state: SequenceState, max_new_tokens: int
    ) -> None:
        self.decoder, self.index, source = decoder, index, state.source
        self.remaining = decoder.target.max_new_tokens(source, max_new_tokens)
        self.process = decoder.processors.start(source, self.remaining)
        self.randomness = decoder.randomness(index)
        if decoder.drafter.requires.encoder:
            source = replace(source, encoded=state.encoded)
        self.session: DraftSession | None = None
        """None: the source is too long for the drafter, and nothing is drafted."""
        with suppress(SourceTooLong):
            self.session = decoder.drafter.open(source, decoder.sampling, self.randomness)
        self.state = state
        self.target_state: TargetState | None = None
        self._length = len(source.prefix)
        self._tokens = torch.empty(self._length + self.remaining, dtype=torch.long)
        self._tokens[: self._length] = source.prefix.cpu()
        self._written = self._tokens.numpy()  # shares memory with _tokens

    @property
    def tokens(self) -> Tensor:
        """[T] all committed tokens including the decoder prefix, on the CPU."""
        return self._tokens[: self._length]

    def propose(self) -> BatchedSteps[Proposal]:
        """Drafts with the session; returns an empty draft if none is possible.

        Raises ValueError if the draft is too long: the verifier's bonus token takes the last
        remaining position.
        """
        limit = self.remaining - 1
        if limit == 0 or self.session is None:
            return NO_DRAFT
        stop = self.decoder.stop.capped(limit)
        steps = self.session.propose(self.tokens, self.target_state, stop)
        proposal = yield from as_steps(steps)
        if len(proposal.tokens) > limit and proposal.depth > limit:
            raise ValueError(
                f"the drafter proposed {proposal.depth} tokens in a row, but the limit was "
                f"{limit}; it must call stop.should_draft before each token"
            )
        return proposal

    def verify(self, proposal: Proposal, output: ForwardOutput) -> BatchedSteps[Verdict]:
        """Verifies a draft. Raises NotFinite, naming input and token, if a row of logits that is
        needed is not finite."""
        logits = self.process(self.tokens, proposal.tokens, output.logits, proposal.parents)
        decoder = self.decoder
        logits = zero_after_eos(logits, proposal, decoder.target.eos_ids)
        arguments = proposal, logits, decoder.sampling, self.randomness
        try:
            return (yield from as_steps(decoder.verifier.steps(*arguments)))
        except NotFinite as error:
            where = f"input {self.index}, new token {self._length - len(self.state.source.prefix)}"
            raise NotFinite(f"{where}: {error}") from None

    def commit(self, drafted: list[int], verdict: Verdict, output: ForwardOutput) -> list[int]:
        """Appends the accepted path and the bonus token, up to the first EOS; returns them.

        Keeps the target's states at the committed rows, as far as the drafter reads them.
        """
        path = verdict.path.tolist()
        emitted = [*(drafted[node] for node in path), verdict.next_token]
        emitted = cut_after_eos(emitted, self.decoder.target.eos_ids)
        ended = emitted[-1] in self.decoder.target.eos_ids
        self._written[self._length : self._length + len(emitted)] = emitted
        self._length += len(emitted)
        self.remaining = 0 if ended else self.remaining - len(emitted)
        accepted = path[: len(emitted) - 1]
        before = len(output.hidden) - len(drafted)  # rows before the draft
        rows = [*range(before), *(before + node for node in accepted)]
        requires = self.decoder.drafter.requires
        states = {layer: output.layer(layer)[rows] for layer in requires.layers}
        columns = self.state if requires.context_layers else None
        self.target_state = TargetState(self._length, states, columns)
        return emitted


@without_gradients
def play_round(decoder: Decoder, active: Sequence[RunningSequence]) -> list[Round]:
    """Runs one round of every active sequence in batched calls: draft, score, verify, commit."""
    target = decoder.target
    began = perf_counter()
    try:
        proposals = run_batched([sequence.propose() for sequence in active])
        if decoder.verifier.function is not verify_greedy or decoder.processors.change_logits:
            # only the greedy rule works on device tokens and accepts NO_TOKEN
            proposals = on_host(proposals)
    except NotFinite as error:
        raise NotFinite(f"drafter {decoder.drafter.name!r}: {error}") from None
    proposals = [proposal.until(target.eos_ids) for proposal in proposals]
    draft_seconds = (perf_counter() - began) / len(active)
    began = perf_counter()
    pairs = list(zip(active, proposals, strict=True))
    drafts = [(sequence.state, sequence.tokens, proposal) for sequence, proposal in pairs]
    outputs = target.score(drafts, decoder.drafter.requires.layers)
    scored = list(zip(active, proposals, outputs, strict=True))
    verdicts = run_batched([sequence.verify(*draft) for sequence, *draft in scored])
    shared_seconds = (perf_counter() - began) / len(active)
    rounds = []
    for (sequence, proposal, output), verdict in zip(scored, verdicts, strict=True):
        began = perf_counter()
        drafted = verdict.drafted
        if drafted is None:
            drafted = proposal.tokens.tolist()
        target.keep(sequence.state, verdict.path, drafted if proposal.is_on_device else None)
        emitted = sequence.commit(drafted, verdict, output)
        drafted = [token for token in drafted if token != NO_TOKEN]
        rounds.append(
            Round(
                sequence=sequence.index,
                drafted=drafted,
                path=verdict.path.tolist(),
                emitted=emitted,
                depth=proposal.depth if decoder.drafter.drafts_trees else None,
                expected=proposal.expected,
                passes=proposal.passes,
                calls=proposal.calls,
                draft_seconds=draft_seconds,
                target_seconds=shared_seconds + perf_counter() - began,
                finished=sequence.remaining == 0,
                too_long=sequence.session is None,
            )
        )
    return rounds


def on_host(proposals: Sequence[Proposal]) -> list[Proposal]:
    """Moves all draft tokens to the host, with one device synchronisation."""
    copied = to_host([proposal.tokens for proposal in proposals])
    return [
        proposal.with_tokens(tokens) if proposal.is_on_device else proposal
        for proposal, tokens in zip(proposals, copied, strict=True)
    ]


def zero_after_eos(logits: Tensor, proposal: Proposal, eos_ids: frozenset[int]) -> Tensor:
    """Sets the rows of target logits after an EOS in the draft to zero. Shapes: [N + 1, V].

    Tokens after EOS are dropped, so those rows may be NaN or infinite and must not be an error.
    """
    if not eos_ids or len(proposal.tokens) == 0:
        return logits
    if proposal.is_on_device:
        return logits.masked_fill(F.pad(proposal.ending(eos_ids), (1, 0))[:, None], 0.0)
    ends = [node + 1 for node, token in enumerate(proposal.tokens.tolist()) if token in eos_ids]
    return logits.index_fill(0, torch.tensor(ends, device=logits.device), 0.0) if ends else logits


def _rounds(
    decoder: Decoder, sources: Iterable[Source], max_new_tokens: int, batch_size: int
) -> Iterator[Round]:
    waiting = iter(enumerate(sources))
    active: list[RunningSequence] = []
    while True:
        entering = list(itertools.islice(waiting, batch_size - len(active)))
        if entering:
            with torch.inference_mode():
                states = decoder.target.encode_all([source for _, source in entering])
                active += [
                    RunningSequence(decoder, index, state, max_new_tokens)
                    for (index, _), state in zip(entering, states, strict=True)
                ]
                del states  # else the cache rows of finished sequences would stay in use
        if not active:
            return
        yield from play_round(decoder, active)
        active = [sequence for sequence in active if sequence.remaining > 0]
