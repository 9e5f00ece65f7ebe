"""Max-Gram: drafts copied from earlier text, without a model (CS Drafting, Chen et al. 2024).

Finds the longest suffix of the sequence (source and output so far) that occurs earlier in it, at
its leftmost occurrence, and drafts the tokens that followed there. If these are too few, the search
continues on the sequence with the draft appended. If nothing matches, a bigram table gives the
likeliest next token. Every draft is a point mass.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import count
from time import perf_counter

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy
from drafttrain.decoding.target_states import TargetState
from drafttrain.decoding.types import Calls, DraftState, Proposal, Sampling, Source


class MaxGramDrafter(Drafter):
    """Drafts chains from the sequence itself and from a bigram table."""

    name = "max-gram"

    def __init__(
        self, bigrams: Sequence[int] | None = None, target: PreTrainedModel | None = None
    ) -> None:
        """bigrams[token]: the likeliest next token, -1 if unknown. target: drafts end before a
        token that its decoder does not have, in a source of another vocabulary (Marian)."""
        self.bigrams, self.vocabulary = bigrams, sys.maxsize
        if target is not None:
            self.vocabulary = target.config.get_text_config(decoder=True).vocab_size

    def open(self, source: Source, sampling: Sampling, randomness: Randomness) -> MaxGramSession:
        return MaxGramSession(self.bigrams, source, self.vocabulary)


class MaxGramSession:
    """One sequence. The searched text is the prompt and the output of a decoder-only target; else
    the source, if it is text, and the output without the decoder prefix."""

    def __init__(self, bigrams: Sequence[int] | None, source: Source, vocabulary: int) -> None:
        self.bigrams, self.vocabulary = bigrams, vocabulary
        read = source.input_ids.tolist() if source.is_text else []
        same = read == source.prefix.tolist()
        self.skipped = 0 if same else len(source.prefix)
        """Number of first committed tokens that are not part of the text."""
        self._read = "" if same else as_text(np.array(read))

    def propose(
        self, tokens: Tensor, target_state: TargetState | None, stop: StopPolicy
    ) -> Proposal:
        began, drafted = perf_counter(), []
        text = self._read + as_text(tokens[self.skipped :].cpu().numpy())
        likeliest = continue_text(text, self.bigrams)
        while stop.should_draft(DraftState(len(drafted))):
            token = next(likeliest, None)
            if token is None or token >= self.vocabulary:
                break
            drafted.append(token)
        calls = {MaxGramDrafter.name: Calls(1, perf_counter() - began)}
        return Proposal.chain(torch.tensor(drafted, dtype=torch.long), passes=0, calls=calls)


def continue_text(text: str, bigrams: Sequence[int] | None) -> Iterator[int]:
    """Yields the tokens drafted after a text whose characters are tokens.

    One search is enough: after a copied token is appended, the longest match is the same match one
    token longer (a longer one would have matched before), and so on into the copied tokens. Without
    a match, tokens of the bigram table are appended.
    """
    while (end := longest_match(text)) < 0:
        token = -1 if bigrams is None or not text else int(bigrams[ord(text[-1])])
        if token < 0:
            return
        yield token
        text += chr(token)
    period = len(text) - end - 1
    for index in count():  # copying wraps around: the text after the match includes the draft
        yield ord(text[end + 1 + index % period])


def longest_match(text: str) -> int:
    """Finds the longest suffix of a text that also occurs earlier; returns the index of the last
    character of its leftmost occurrence, or -1 if there is none.

    The two may overlap, as in periodic text.
    """

    def occurrence(length: int) -> int:
        return text.find(text[-length:], 0, -1)

    # bisection: if a suffix occurs earlier, so do all shorter ones
    longest = bisect_left(range(1, len(text)), True, key=lambda length: occurrence(length) < 0)
    return occurrence(longest) + longest - 1 if longest else -1


def as_text(tokens: np.ndarray) -> str:
    """Encodes tokens as characters, so that `str.find` can search them quickly."""
    return tokens.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
