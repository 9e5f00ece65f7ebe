"""Streaming of text and the account of a round, as `drafttrain generate` shows them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from drafttrain.decoding.types import Round
from drafttrain.generate import RoundParts, TextStream, show_round, split_round


def decode_bytes(tokens: Sequence[int]) -> str:
    """One token a byte, as byte-level tokenizers have it."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_streamed_text_is_the_decoded_text_however_rounds_cut_it(text, cuts):
    tokens = list(text.encode("utf-8", errors="ignore"))
    stream, pieces, start = TextStream(decode_bytes), [], 0
    for cut in cuts:
        pieces.append(stream.push(tokens[start : start + cut]))
        start += cut
    pieces.append(stream.push(tokens[start:]))
    pieces.append(stream.finish())
    assert "".join(pieces) == decode_bytes(tokens)


def test_a_half_character_is_never_shown():
    stream = TextStream(decode_bytes)
    first, second = "ein é ".encode()[:5], "ein é ".encode()[5:]
    assert stream.push(list(first)) == "ein "
    assert stream.push(list(second)) == "é "


def test_a_word_is_shown_when_the_next_one_begins():
    words = {0: "walk", 1: "ing", 2: " home"}
    stream = TextStream(lambda tokens: "".join(words[token] for token in tokens))
    assert stream.push([0]) == ""
    assert stream.push([1]) == ""
    assert stream.push([2]) == "walking "
    assert stream.finish() == "home"


def test_text_that_a_clean_up_rule_rewrote_is_given_again_whole():
    words = {0: "do", 1: " n", 2: "'t go"}
    stream = TextStream(lambda tokens: "".join(map(words.get, tokens)).replace(" n't", "n't"))
    assert stream.push([0, 1]) == "do "
    assert stream.push([2]) == ""
    assert stream.finish() == "\ndon't go"


def played(drafted: list[int], accepted: int, emitted: list[int]) -> Round:
    return Round(sequence=0, drafted=drafted, path=list(range(accepted)), emitted=emitted)


def test_a_round_splits_into_accepted_added_and_rejected():
    assert split_round(played([5, 6, 7], 1, [5, 9])) == RoundParts([5], [9], [6, 7])
    assert split_round(played([5, 6], 2, [5, 6, 9])) == RoundParts([5, 6], [9], [])
    assert split_round(played([], 0, [9])) == RoundParts([], [9], [])


def test_what_a_draft_holds_past_eos_is_not_accepted():
    assert split_round(played([5, 1, 7], 3, [5, 1])) == RoundParts([5, 1], [], [7])


def test_a_round_is_readable_without_colour():
    line = show_round(2, played([5, 6, 7], 1, [5, 9]), lambda tokens: [f"t{t}" for t in tokens])
    assert line.plain == "  2   1/3  t5 +t9  ×t6 t7"
