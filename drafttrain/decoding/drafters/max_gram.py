"""Max-Gram: drafts copied from what was said before, at no cost (CS Drafting, Chen et al. 2024).

The longest suffix of the sequence that occurs earlier in it (source and output so far; the
leftmost place, if several) is taken to go on as it did there. Where that gives too few tokens, the
same is asked of the sequence with them appended; where nothing matches, a table says which token
usually follows the last one. Every draft is a point mass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.drafters.suffix_index import SuffixIndex
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Calls, DraftState, Proposal, Sampling, Source

MAX_GRAM = "max-gram"
"""Its name, in settings and in reports."""


class MaxGramDrafter(Drafter):
    """Drafts chains from the sequence itself, and from a table of likeliest successors."""

    name = MAX_GRAM

    def __init__(self, bigrams: Sequence[int] | None = None) -> None:
        """bigrams[token]: the token that usually follows it, -1 where none is known."""
        self.bigrams = bigrams

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> MaxGramSession:
        return MaxGramSession(self.bigrams, source)


class MaxGramSession:
    """One sequence: an index of all that was said, which grows with it.

    What an encoder read, where it is text, stands in front of the output; what a decoder starts
    from, which is no part of the text, is left out. A decoder-only prompt is the beginning of the
    sequence itself.
    """

    def __init__(self, bigrams: Sequence[int] | None, source: Source) -> None:
        self.bigrams = bigrams
        self.index = SuffixIndex()
        read = source.input_ids.tolist() if source.is_text else []
        same = read == source.prefix.tolist()
        self.skipped = 0 if same else len(source.prefix)
        """Committed tokens that are not part of the text."""
        self.source = 0 if same else len(read)
        """Tokens of the index that stand in front of the output."""
        self._seen = np.empty(0, dtype=np.int64)
        """The output that the index holds."""
        if not same:
            self._append(read)

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        began = perf_counter()
        self._follow(tokens[self.skipped :])
        drafted: list[int] = []
        likeliest = self._continue()
        while stop.should_draft(DraftState(len(drafted))):
            token = next(likeliest, None)
            if token is None:
                break
            drafted.append(token)
        likeliest.close()
        calls = {MAX_GRAM: Calls(1, perf_counter() - began)}
        return Proposal.chain(torch.tensor(drafted, dtype=torch.long), passes=0, calls=calls)

    def _follow(self, output: Tensor) -> None:
        """Let the index hold the source and this output; what differs is taken back."""
        now = output.cpu().numpy()  # comparing thousands of numbers takes a few microseconds here
        shared = min(len(self._seen), len(now))
        same = self._seen[:shared] == now[:shared]
        if not same.all():
            shared = int(same.argmin())
        if shared < len(self._seen):
            self.index.truncate(self.source + shared)
        self._seen = now
        self._append(now[shared:].tolist())

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.index.append(token)

    def _continue(self) -> Iterator[int]:
        """What follows the sequence, token by token.

        A match need be found once only: with the token that followed it appended, the longest match
        is the same one token longer (a longer one would have been there before), and so on into
        what was copied. While there is none, tokens of the table are appended, and taken back.
        """
        length, end = self.index.longest_match()
        if length == 0 and self.bigrams is not None and self.index.tokens:
            kept = len(self.index)
            try:
                while length == 0:
                    token = int(self.bigrams[self.index.tokens[-1]])
                    if token < 0:
                        return
                    yield token
                    self.index.append(token)
                    length, end = self.index.longest_match()
                yield from self._copy(end + 1)
            finally:
                self.index.truncate(kept)
        elif length > 0:
            yield from self._copy(end + 1)

    def _copy(self, first: int) -> Iterator[int]:
        """The tokens from a place on, for ever: behind the last come those copied already."""
        tokens = self.index.tokens
        period = len(tokens) - first
        for place in count():
            yield tokens[first + place % period]
