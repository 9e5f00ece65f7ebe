"""The suffix index against a search that reads everything again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafttrain.decoding.drafters.suffix_index import SuffixIndex
from tests.decoding.drafters.slow_match import slow_match

tokens = st.lists(st.integers(0, 3), max_size=40)


def build(sequence: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    for token in sequence:
        index.append(token)
    return index


@given(tokens)
def test_the_longest_match_is_that_of_a_full_search(sequence):
    index = SuffixIndex()
    for count, token in enumerate(sequence, start=1):
        index.append(token)
        assert index.longest_match() == slow_match(sequence[:count])


@given(tokens, tokens, tokens)
def test_what_was_appended_can_be_taken_back(kept, tried, after):
    index = build(kept)
    for token in tried:
        index.append(token)
        index.longest_match()
    index.truncate(len(kept))
    fresh = build(kept)
    assert vars(index) == vars(fresh)
    for token in after:
        index.append(token)
        fresh.append(token)
        assert index.longest_match() == fresh.longest_match()


def test_histories_of_no_and_one_token_match_nothing():
    assert SuffixIndex().longest_match() == (0, -1)
    assert build([7]).longest_match() == (0, -1)
    assert build([7, 7]).longest_match() == (1, 0)


def test_of_equal_matches_the_leftmost_counts():
    """2 3 ends at 1, 4 and 8: the first; then 9 2 3, which is longer, ends at 4 only."""
    assert build([2, 3, 9, 2, 3, 5, 6, 2, 3]).longest_match() == (2, 1)
    assert build([2, 3, 9, 2, 3, 5, 9, 2, 3]).longest_match() == (3, 4)
