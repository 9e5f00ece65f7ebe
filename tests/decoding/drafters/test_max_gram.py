"""Max-Gram: what it copies and where it searches."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.decoding.drafters.max_gram import MaxGramDrafter, as_text, longest_match
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling, Source


def draft(tokens: list[int], k: int, bigrams=None, source: list[int] | None = None) -> list[int]:
    """Returns a draft after these tokens; with a source, for an encoder-decoder (start token 0)."""
    read, tokens = (tokens[:1], tokens) if source is None else (source, [0, *tokens])
    given = Source.of_text(torch.tensor(read), torch.tensor(tokens[:1]))
    session = MaxGramDrafter(bigrams).open(given, Sampling(), None)
    proposal = session.propose(torch.tensor(tokens), None, FixedLength(k))
    assert proposal.passes == 0
    return proposal.tokens.tolist()


def slow_match(sequence: list[int]) -> tuple[int, int]:
    """Returns the length of the longest suffix that also ends earlier, and its leftmost end."""
    for length in range(len(sequence) - 1, 0, -1):
        suffix = sequence[-length:]
        for end in range(length - 1, len(sequence) - 1):
            if sequence[end - length + 1 : end + 1] == suffix:
                return length, end
    return 0, -1


def slow_draft(history: list[int], k: int, bigrams) -> list[int]:
    """Follows the paper: copies what follows the match, at most k tokens; repeats if fewer."""
    drafted: list[int] = []
    while len(drafted) < k:
        sequence = history + drafted
        length, end = slow_match(sequence)
        if length > 0:
            drafted += sequence[end + 1 :][: k - len(drafted)]
        elif bigrams is not None and bigrams[sequence[-1]] >= 0:
            drafted.append(bigrams[sequence[-1]])
        else:
            break
    return drafted


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.integers(1, 12),
    st.one_of(st.none(), st.lists(st.integers(-1, 3), min_size=4, max_size=4)),
)
def test_drafts_are_those_of_a_search_that_reads_everything(history, k, bigrams):
    assert draft(history, k, bigrams) == slow_draft(history, k, bigrams)


def test_of_equal_matches_the_leftmost_counts():
    """2 3 ends at 1, 4 and 8, so at 1; then the longer 9 2 3 ends only at 4."""
    assert longest_match(as_text(np.array([2, 3, 9, 2, 3, 5, 6, 2, 3]))) == 1
    assert longest_match(as_text(np.array([2, 3, 9, 2, 3, 5, 9, 2, 3]))) == 4


def test_a_session_whose_sequence_changed_drafts_as_a_fresh_one():
    """This occurs in a cascade, whose outer levels may reject tokens that the session has seen."""
    source = Source.of_text(torch.tensor([2, 5]), torch.tensor([0]))
    session = MaxGramDrafter([1] * 9).open(source, Sampling(), None)
    for output in ([], [2, 5, 3], [2, 5, 4, 4], [2], [2, 5, 4, 4, 2]):
        found = session.propose(torch.tensor([0, *output]), None, FixedLength(6)).tokens.tolist()
        assert found == draft(output, 6, [1] * 9, source=[2, 5])


def test_the_match_may_cross_the_seam_of_source_and_output_but_not_the_start_token():
    """Source 5 6 7, output 8 5 6: the earlier 5 6 was followed by 7 and then by 8 5 6."""
    assert draft([8, 5, 6], 4, source=[5, 6, 7]) == [7, 8, 5, 6]
    assert draft([7], 2, source=[6, 7]) == [7, 7]  # 7 7 across the boundary
    assert draft([], 3, source=[5, 6, 7]) == []  # no repetition and no table


def test_too_few_tokens_after_a_match_are_continued_up_to_the_requested_length():
    assert draft([4, 5, 4, 5], 5) == [4, 5, 4, 5, 4]
    assert draft([1, 2, 3, 1], 1) == [2]
    assert draft([1, 2, 3, 1], 9) == [2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_the_bigram_table_is_used_where_nothing_matches():
    table = [-1, 2, 3, -1]
    assert draft([1], 5, table) == [2, 3]
    assert draft([0], 5, table) == []
    assert draft([1], 5) == []
