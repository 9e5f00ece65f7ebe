"""The plain data of a round of speculative decoding; `decoding/roles.py` says who makes what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drafttrain.config.kinds import DrawKind


class NotFinite(ValueError):
    """Scores or probabilities of a model that are NaN or infinite where they decide."""

    @staticmethod
    def of_drafter() -> NotFinite:
        return NotFinite(
            "the drafter's logits are NaN or infinite; load it in float32 or bfloat16, or train it "
            "again"
        )


@dataclass(frozen=True)
class Sampling:
    """How the user asked the target to decode. Temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether every token keeps its probability, up to temperature."""
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Source:
    """What one sequence is decoded from. Encoder-decoder models encode it for themselves, but for
    drafters that read the target's encoder."""

    inputs: Mapping[str, Tensor]
    """What the target's processor makes of an input, without a batch axis or padding: `input_ids`
    [S] of a text or prompt; features under the names that the encoder takes."""
    prefix: Tensor
    """[P] token ids that every model's decoder starts from: the decoder start token and what is
    forced behind it, or the whole prompt where models are decoder-only."""
    chosen_from: Tensor | None = None
    """[C] tokens of which the target chooses one when it encodes the source, by its logits after
    the first token of the prefix; it then stands behind that (the language of a clip). None: the
    prefix is whole."""
    encoded: Tensor | None = None
    """[S, D] what the target's encoder made of the inputs, where a drafter reads that instead of
    encoding them itself."""

    @staticmethod
    def of_text(input_ids: Tensor, prefix: Tensor) -> Source:
        """A text or prompt [S], and what the decoder starts from [P]."""
        return Source({"input_ids": input_ids}, prefix)

    @property
    def is_text(self) -> bool:
        return "input_ids" in self.inputs

    @property
    def input_ids(self) -> Tensor:
        """[S] token ids of the source or prompt. Raises ValueError where it is no text."""
        if not self.is_text:
            raise ValueError(
                f"the source holds {', '.join(self.inputs)}, no text; this drafter reads texts "
                "alone: use one that reads the target's own encoder, or copies from the output"
            )
        return self.inputs["input_ids"]


NO_TOKEN = -1
"""In place of a token that is not there; no target ever chooses it."""
NOT_FINITE = -2
"""In place of a token whose row is not finite, on a device that is not waited for."""


class SourceTooLong(ValueError):
    """A source has more tokens than the drafter takes: the sequence is decoded plainly."""


@dataclass(frozen=True)
class Calls:
    """What one drafter among several did for a draft."""

    count: int
    """Its sequential calls; of a drafter without a model, how often it was asked."""
    seconds: float
    """Their wall clock."""

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.count + other.count, self.seconds + other.seconds)


@dataclass(frozen=True)
class Proposal:
    """One sequence's draft. A chain has parents = [-1, 0, 1, ...]."""

    tokens: Tensor
    """[N] parents before children, siblings in draw order. On the CPU, but for greedy chains that
    a device drafted: whoever reads these waits for it."""
    parents: Tensor
    """[N] index of the parent, -1 = the last committed token."""
    draw_kind: DrawKind = "deterministic"
    """How the tokens were drawn; a verifier states which draws it is valid for."""
    draft_probs: Tensor | None = None
    """[R, V] the rows the tokens were drawn from; None = point mass."""
    rows: Tensor | None = None
    """[N] row of each token (siblings share one); None with draft_probs = token i has row i."""
    counts: Tensor | None = None
    """[N] i.i.d. paths through the node; None = one each."""
    passes: int = 0
    """Sequential calls of models that this draft cost."""
    hidden: Sequence[Tensor] | None = None
    """[D] each, M of them: the states that the stop policy reads, or could have read, of this draft
    (`DraftState`), for logs; None where it reads none."""
    logits: Callable[[], Sequence[Tensor | None]] | None = None
    """Gives the N rows [V] of a chain before warping, None for copied tokens, where the drafter has
    them, to what reads them: lenient reviews inside cascades. They are made only when needed."""
    copied: Tensor | None = None
    """[N] bool, tokens that were copied, among others drawn from a model's rows; None: no token
    where there are draft_probs, else all."""
    expected: float | None = None
    """How many tokens of this draft the drafter expects to be accepted, where it works that out."""
    calls: Mapping[str, Calls] | None = None
    """The calls of each drafter by its name, where several had a part in it."""

    @staticmethod
    def empty() -> Proposal:
        nothing = torch.empty(0, dtype=torch.long)
        return Proposal(tokens=nothing, parents=nothing)

    @staticmethod
    def chain(
        tokens: Tensor,
        draft_probs: Tensor | None = None,
        passes: int = 1,
        hidden: Sequence[Tensor] | None = None,
        logits: Callable[[], Sequence[Tensor]] | None = None,
        calls: Mapping[str, Calls] | None = None,
    ) -> Proposal:
        return Proposal(
            tokens,
            torch.arange(-1, len(tokens) - 1),
            "deterministic" if draft_probs is None else "iid",
            draft_probs,
            passes=passes,
            calls=calls,
            hidden=hidden,
            logits=logits,
        )

    @staticmethod
    def side_by_side(proposals: Sequence[Proposal]) -> Proposal:
        """Trees of several drafters as one, each below the last committed token.

        Siblings then come from rows of their own. All must have draft_probs.
        """
        tokens, parents, rows, counts = [], [], [], []
        nodes = known = 0
        for proposal in proposals:
            own = torch.arange(len(proposal.tokens)) if proposal.rows is None else proposal.rows
            copies = torch.ones_like(own) if proposal.counts is None else proposal.counts
            tokens.append(proposal.tokens)
            parents.append(torch.where(proposal.parents < 0, -1, proposal.parents + nodes))
            rows.append(own + known)
            counts.append(copies)
            nodes += len(proposal.tokens)
            known += 0 if proposal.draft_probs is None else len(proposal.draft_probs)
        return Proposal(
            tokens=torch.cat(tokens),
            parents=torch.cat(parents),
            draw_kind="independent",
            draft_probs=torch.cat([p.draft_probs for p in proposals if p.draft_probs is not None]),
            rows=torch.cat(rows),
            counts=torch.cat(counts),
            passes=sum(proposal.passes for proposal in proposals),
        )

    def until(self, ends: frozenset[int]) -> Proposal:
        """The draft without what follows a token that ends the sequence: nothing judges that.

        Of a chain on a device, which is not waited for, those tokens become `NO_TOKEN`.
        """
        if not ends:
            return self
        if self.is_on_device:
            ending = self.ending(ends)
            over = ending.cumsum(0) > ending.long()
            return replace(self, tokens=self.tokens.masked_fill(over, NO_TOKEN))
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        if ends.isdisjoint(tokens):
            return self
        place: dict[int, int] = {-1: -1}
        """Of each node that is kept."""
        for node, parent in enumerate(parents):
            if parent in place and (parent < 0 or tokens[parent] not in ends):
                place[node] = len(place) - 1
        kept = [node for node in place if node >= 0]
        if len(kept) == len(tokens):
            return self
        rows = self.rows
        if rows is None and self.draft_probs is not None:
            rows = torch.arange(len(tokens))
        return replace(
            self,
            tokens=self.tokens[kept],
            parents=torch.tensor([place[parents[node]] for node in kept], dtype=torch.long),
            rows=None if rows is None else rows[kept],
            counts=None if self.counts is None else self.counts[kept],
            copied=None if self.copied is None else self.copied[kept],
        )

    def on_host(self) -> Proposal:
        """The same with tokens that the host knows; waits for a device that drafted them."""
        return self.with_tokens(self.tokens.cpu()) if self.is_on_device else self

    def with_tokens(self, tokens: Tensor) -> Proposal:
        """The same with its tokens, which the host knows. Raises NotFinite for `NOT_FINITE`."""
        if NOT_FINITE in tokens.tolist():
            raise NotFinite.of_drafter()
        return replace(self, tokens=tokens)

    def ending(self, ends: frozenset[int]) -> Tensor:
        """[N] which tokens end a sequence, where the tokens are."""
        return torch.isin(self.tokens, torch.tensor(sorted(ends), device=self.tokens.device))

    @property
    def is_on_device(self) -> bool:
        """Whether the host does not know the tokens yet; only chains are left there."""
        return self.tokens.device.type != "cpu"

    @property
    def is_copied(self) -> Tensor:
        """[N] which tokens were copied, on the CPU."""
        if self.copied is not None:
            return self.copied
        return torch.full((len(self.tokens),), self.draft_probs is None)

    @property
    def is_chain(self) -> bool:
        return self.parents.tolist() == list(range(-1, len(self.tokens) - 1))

    @property
    def depth(self) -> int:
        """Tokens on the longest path."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass(frozen=True)
class DraftState:
    """What a stop policy may look at before a token is drafted; never that token itself.

    A policy is asked before the drafter call that would draft token number depth + 1. A drafter
    that proposes one token a call knows, at that point, the rows of tokens 1..depth, and their
    states as they were drawn; their states at their own positions only for tokens 1..depth - 1: the
    last token has not been fed to it yet (the lag of SpecDec++ Algorithm 2). A block drafter knows
    the rows of tokens 1..depth + 1, and all its slots' states: they are there before any token is
    drawn.
    """

    depth: int
    """Tokens drafted so far in this round (this token would be number depth + 1); in a tree, its
    levels so far."""
    logits: Sequence[Tensor] = ()
    """[V] each: the drafter's rows that are known, in order, before temperature."""
    hidden: Sequence[Tensor] = ()
    """[D] each: states of the kind that the policy reads, as far as they are known, in order: of
    each drafted token, or of each slot."""
    expected: Sequence[float] = field(default=(), kw_only=True)
    """How many tokens the drafter expects to be accepted, after each level of its tree."""
    notes: dict[str, list[float]] = field(default_factory=dict, kw_only=True)
    """What the policy has worked out in this round so far: a drafter hands the same notes back at
    every question of a round, so that nothing is worked out twice."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's decision on one proposal."""

    path: Tensor
    """[A] indices of the accepted nodes, from the root down."""
    next_token: int
    """The correction or bonus token that follows the path."""
    drafted: Sequence[int] | None = None
    """The draft's tokens, where the decision brought them along from the device."""


@dataclass(frozen=True)
class Round:
    """The facts of one round of one sequence. Rates are left to `evaluation/metrics.py`."""

    sequence: int
    """Index of the sequence among the sources."""
    drafted: Sequence[int]
    """Token ids of the proposal, a tree's level by level."""
    path: Sequence[int]
    """Indices into `drafted` that were accepted."""
    emitted: Sequence[int]
    """Tokens committed, correction or bonus included, cut after EOS or at the maximal length."""
    passes: int = 0
    """Sequential calls of drafting models."""
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    finished: bool = False
    """Whether the sequence ended with this round (EOS or maximal length)."""
    depth: int | None = None
    """Tokens on the longest path of the proposal; None: it is a chain."""
    expected: float | None = None
    """Drafted tokens that the drafter expected to be accepted, where it works that out."""
    calls: Mapping[str, Calls] | None = None
    """Calls of each drafter by its name, where several draft."""
    too_long: bool = False
    """Whether nothing is drafted, as the sequence's source is longer than the drafter takes."""
    shared_by: int = 1
    """Sequences that were under way and shared the calls; seconds are this one's part."""

    @property
    def levels(self) -> int:
        """Positions that were drafted: tokens of a chain, levels of a tree."""
        return len(self.drafted) if self.depth is None else self.depth


@dataclass
class Output:
    """One decoded sequence: new tokens (EOS included where it came) and its rounds."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    """Wall clock of this sequence alone, encoding included (batch 1)."""
