"""Max-Gram: drafts copied from what was said before, at no cost (CS Drafting, Chen et al. 2024).

The longest suffix of the sequence that occurs earlier in it (source and output so far; the
leftmost place, if several) is taken to go on as it did there. Where that gives too few tokens, the
same is asked of the sequence with them appended; where nothing matches, a table says which token
usually follows the last one. Every draft is a point mass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

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
    """One sequence.

    What an encoder read, where it is text, stands in front of the output; what a decoder starts
    from, which is no part of the text, is left out. A decoder-only prompt is the beginning of the
    sequence itself.
    """

    def __init__(self, bigrams: Sequence[int] | None, source: Source) -> None:
        self.bigrams = bigrams
        read = source.input_ids.tolist() if source.is_text else []
        same = read == source.prefix.tolist()
        self.skipped = 0 if same else len(source.prefix)
        """Committed tokens that are not part of the text."""
        self._read = "" if same else as_text(np.array(read))

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        began = perf_counter()
        drafted: list[int] = []
        text = self._read + as_text(tokens[self.skipped :].cpu().numpy())
        likeliest = continue_text(text, self.bigrams)
        while stop.should_draft(DraftState(len(drafted))):
            token = next(likeliest, None)
            if token is None:
                break
            drafted.append(token)
        calls = {MAX_GRAM: Calls(1, perf_counter() - began)}
        return Proposal.chain(torch.tensor(drafted, dtype=torch.long), passes=0, calls=calls)


def continue_text(text: str, bigrams: Sequence[int] | None) -> Iterator[int]:
    """What follows a text, whose characters are tokens, token by token.

    A match need be found once only: with the token that followed it appended, the longest match is
    the same one token longer (a longer one would have been there before), and so on into what was
    copied. While there is none, tokens of the table are appended.
    """
    while (end := longest_match(text)) < 0:
        token = -1 if bigrams is None or not text else int(bigrams[ord(text[-1])])
        if token < 0:
            return
        yield token
        text += chr(token)
    period = len(text) - end - 1
    for place in count():  # after the last token come those copied already
        yield ord(text[end + 1 + place % period])


def longest_match(text: str) -> int:
    """Where the longest suffix of a text ends that occurs earlier too, leftmost; -1: nowhere.

    The two may overlap, as in periodic text. Where a suffix occurs, so do all shorter ones.
    """

    def place(length: int) -> int:
        return text.find(text[-length:], 0, -1)

    longest = bisect_left(range(1, len(text)), True, key=lambda length: place(length) < 0)
    return place(longest) + longest - 1 if longest else -1


def as_text(tokens: np.ndarray) -> str:
    """Tokens as characters, among which Python searches fast."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
