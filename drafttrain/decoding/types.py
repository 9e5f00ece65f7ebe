"""Data of a round of speculative decoding, exchanged by the roles of `decoding/roles.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drafttrain.config.decode import SamplingConfig
from drafttrain.config.kinds import DrawKind


class NotFinite(ValueError):
    """A model's logits or probabilities are NaN or infinite in a row that is needed."""

    @staticmethod
    def of_drafter() -> NotFinite:
        """Returns the error for a drafter's logits."""
        return NotFinite(
            "the drafter's logits are NaN or infinite; load it in float32 or bfloat16, or train it "
            "again"
        )


@dataclass(frozen=True)
class Sampling:
    """The user's sampling parameters for the target. Temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @staticmethod
    def of(config: SamplingConfig) -> Sampling:
        return Sampling(config.temperature, config.top_k, config.top_p, config.min_p)

    @property
    def keeps_all(self) -> bool:
        """Whether no token is excluded, so that only the temperature applies."""
        return self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Source:
    """The input of one sequence."""

    inputs: Mapping[str, Tensor]
    """The output of the target's processor for one input, without batch axis or padding:
    `input_ids` [S] of a text or prompt, or features under the encoder's argument names."""
    prefix: Tensor
    """[P] token ids that the decoder starts from: the decoder start token and the forced tokens
    after it, or the whole prompt of a decoder-only model."""
    language_is_open: bool = False
    """Whether the token of a clip's language is still missing after the first token of the prefix:
    the target detects it when it encodes the clip."""
    encoded: Tensor | None = None
    """[S, D] the target's encoder states, for drafters that read them instead of encoding the
    inputs themselves."""

    @staticmethod
    def of_text(input_ids: Tensor, prefix: Tensor) -> Source:
        """Returns the source of a text or prompt [S] with the decoder prefix [P]."""
        return Source({"input_ids": input_ids}, prefix)

    @property
    def is_text(self) -> bool:
        return "input_ids" in self.inputs

    @property
    def input_ids(self) -> Tensor:
        """[S] token ids of the source or prompt. Raises ValueError if it is not a text."""
        if not self.is_text:
            raise ValueError(
                f"the source holds {', '.join(self.inputs)} and no text, but this drafter reads "
                "only text; use one that reads the target's encoder states or copies earlier output"
            )
        return self.inputs["input_ids"]


NO_TOKEN = -1
"""Placeholder for a missing token; no target ever chooses it."""
NOT_FINITE = -2
"""Marks, on a device, a token whose row of logits is not finite; the host raises `NotFinite`."""


class SourceTooLong(ValueError):
    """The source is longer than the drafter accepts; the sequence is decoded without drafting."""


@dataclass(frozen=True)
class Calls:
    """The calls of one of several drafters for one draft, and their wall-clock time."""

    count: int
    """Sequential model calls; without a model, the number of times it drafted."""
    seconds: float

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.count + other.count, self.seconds + other.seconds)


@dataclass(frozen=True)
class Proposal:
    """One sequence's draft. A chain has parents = [-1, 0, 1, ...]."""

    tokens: Tensor
    """[N] parents before children, siblings in the order drawn. On the CPU, except for greedy
    chains drafted on a device: reading those needs a device synchronisation."""
    parents: Tensor
    """[N] index of each token's parent; -1: the last committed token."""
    draw_kind: DrawKind = "deterministic"
    """How the tokens were drawn; a verifier states which draws it is valid for."""
    draft_probs: Tensor | None = None
    """[R, V] the distributions that the tokens were drawn from; None: a point mass on each."""
    rows: Tensor | None = None
    """[N] index into draft_probs of each token (siblings share one); None: token i has row i."""
    counts: Tensor | None = None
    """[N] number of i.i.d. paths through each node; None: one each."""
    passes: int = 0
    """Sequential model calls that this draft took."""
    logits: Callable[[], Sequence[Tensor | None]] | None = None
    """Computes, on demand, the N rows of logits [V] of a chain before warping, None for copied
    tokens. Read by lenient reviews inside cascades; None: the drafter does not provide them."""
    copied: Tensor | None = None
    """[N] bool, which tokens were copied and not drawn from a model's distribution; None: no token
    if there are draft_probs, else all."""
    expected: float | None = None
    """Number of tokens that the drafter expects to be accepted; None: it does not compute it."""
    calls: Mapping[str, Calls] | None = None
    """The calls of each drafter by name, if several took part."""

    @staticmethod
    def empty() -> Proposal:
        return Proposal.chain(torch.empty(0, dtype=torch.long), passes=0)

    @staticmethod
    def chain(
        tokens: Tensor,
        draft_probs: Tensor | None = None,
        passes: int = 1,
        logits: Callable[[], Sequence[Tensor]] | None = None,
        calls: Mapping[str, Calls] | None = None,
    ) -> Proposal:
        """Returns a chain of i.i.d. draws from draft_probs, or of point masses if that is None."""
        return Proposal(
            tokens,
            torch.arange(-1, len(tokens) - 1),
            "deterministic" if draft_probs is None else "iid",
            draft_probs,
            passes=passes,
            calls=calls,
            logits=logits,
        )

    @staticmethod
    def side_by_side(trees: Sequence[Proposal]) -> Proposal:
        """Merges paths that several drafters drew below the last committed token.

        Siblings may then have different rows.
        """
        parents, rows = [], []
        first_node = first_row = 0
        for tree in trees:
            parents.append(torch.where(tree.parents < 0, -1, tree.parents + first_node))
            rows.append(tree.rows + first_row)
            first_node += len(tree.tokens)
            first_row += len(tree.draft_probs)
        return Proposal(
            torch.cat([tree.tokens for tree in trees]),
            torch.cat(parents),
            "independent",
            torch.cat([tree.draft_probs for tree in trees]),
            torch.cat(rows),
            torch.cat([tree.counts for tree in trees]),
            sum(tree.passes for tree in trees),
        )

    def until(self, ends: frozenset[int]) -> Proposal:
        """Removes the tokens after an EOS (a token in `ends`), which are never verified.

        In a chain on a device they become `NO_TOKEN` instead, without a device synchronisation.
        """
        if not ends:
            return self
        if self.is_on_device:
            ending = self.ending(ends)
            after_end = ending.cumsum(0) > ending.long()  # an EOS before this token
            return replace(self, tokens=self.tokens.masked_fill(after_end, NO_TOKEN))
        tokens, parents = self.tokens.tolist(), self.parents.tolist()
        if ends.isdisjoint(tokens):
            return self
        new_index: dict[int, int] = {-1: -1}  # old index of each kept node -> new index
        for node, parent in enumerate(parents):
            if parent in new_index and (parent < 0 or tokens[parent] not in ends):
                new_index[node] = len(new_index) - 1
        kept = [node for node in new_index if node >= 0]
        if len(kept) == len(tokens):
            return self
        rows = torch.arange(len(tokens)) if self.rows is None else self.rows
        return replace(
            self,
            tokens=self.tokens[kept],
            parents=torch.tensor([new_index[parents[node]] for node in kept], dtype=torch.long),
            rows=rows[kept],
            counts=None if self.counts is None else self.counts[kept],
            copied=None if self.copied is None else self.copied[kept],
        )

    def on_host(self) -> Proposal:
        """Returns the draft with its tokens on the host; may need a device synchronisation."""
        return self.with_tokens(self.tokens.tolist()) if self.is_on_device else self

    def with_tokens(self, tokens: Sequence[int]) -> Proposal:
        """Returns the draft with these tokens on the host. Raises NotFinite for `NOT_FINITE`."""
        if NOT_FINITE in tokens:
            raise NotFinite.of_drafter()
        return replace(self, tokens=torch.tensor(tokens, dtype=torch.long))

    def ending(self, ends: frozenset[int]) -> Tensor:
        """Returns which tokens [N] are EOS (in `ends`), on the tokens' device."""
        return torch.isin(self.tokens, torch.tensor(sorted(ends), device=self.tokens.device))

    @property
    def is_on_device(self) -> bool:
        """Whether the tokens, then a chain, are still on a device."""
        return self.tokens.device.type != "cpu"

    @property
    def is_copied(self) -> Tensor:
        """[N] bool, which tokens were copied, on the CPU."""
        if self.copied is not None:
            return self.copied
        return torch.full((len(self.tokens),), self.draft_probs is None)

    @property
    def is_chain(self) -> bool:
        return self.parents.tolist() == list(range(-1, len(self.tokens) - 1))

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass(frozen=True)
class DraftState:
    """What a stop policy may read before token number depth + 1 is drafted; never that token.

    A drafter of one token per call then knows the rows of tokens 1..depth and the states that they
    were drawn from. States at the tokens' own positions are known only for tokens 1..depth - 1,
    because the last token has not been an input yet (the lag of SpecDec++ Algorithm 2). A block
    drafter knows the rows of tokens 1..depth + 1, which exist before any token is drawn.
    """

    depth: int
    """Number of tokens (levels of a tree) drafted so far in this round."""
    logits: Sequence[Tensor] = ()
    """[V] each: the drafter's rows known so far, in order, before temperature."""
    hidden: Sequence[Tensor] = ()
    """[D] each: the hidden states of draft tokens known so far, in order, of the kind that the
    policy reads."""
    expected: Sequence[float] = field(default=(), kw_only=True)
    """Expected number of accepted tokens after each level of the tree."""
    notes: dict[str, list[float]] = field(default_factory=dict, kw_only=True)
    """The policy's cache: the drafter passes the same dictionary at every call of a round."""


@dataclass(frozen=True)
class Verdict:
    """The result of verifying one proposal."""

    path: Tensor
    """[A] indices of the accepted nodes, from the root down."""
    next_token: int
    """The correction or bonus token that follows the path."""
    drafted: Sequence[int] | None = None
    """The draft tokens, if verification copied them from the device; else None."""


@dataclass(frozen=True)
class Round:
    """The record of one round of one sequence; `evaluation/metrics.py` computes rates from it."""

    sequence: int
    """Index of the sequence among the sources."""
    drafted: Sequence[int]
    """Token ids of the proposal; a tree level by level."""
    path: Sequence[int]
    """Indices into `drafted` of the accepted tokens."""
    emitted: Sequence[int]
    """Tokens committed, bonus token included, cut after EOS or at the maximal length."""
    passes: int = 0
    """Sequential calls of draft models."""
    draft_seconds: float = 0.0
    """Its share of the time of the batch, as `target_seconds`."""
    target_seconds: float = 0.0
    finished: bool = False
    """Whether the sequence ended with this round (EOS or maximal length)."""
    depth: int | None = None
    """Number of tokens on the longest path of the tree; None: the proposal is a chain."""
    expected: float | None = None
    """`Proposal.expected`."""
    calls: Mapping[str, Calls] | None = None
    """`Proposal.calls`."""
    too_long: bool = False
    """Whether nothing is drafted because the source is too long for the drafter."""

    @property
    def levels(self) -> int:
        """Number of drafted positions: tokens of a chain, levels of a tree."""
        return len(self.drafted) if self.depth is None else self.depth


@dataclass
class Output:
    """One decoded sequence: its new tokens (with EOS, if it was generated) and its rounds."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    """Wall-clock time from entering the batch to the end, encoding included."""
