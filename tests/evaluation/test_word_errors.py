"""Word error rates, by hand."""

from __future__ import annotations

import numpy as np

from drafttrain.evaluation.quality import word_error_metrics, word_errors


def test_errors_are_counted_after_whispers_normaliser():
    said = ["mister smith is here", "it is ten o'clock", "one two three", None]
    heard = ["Mr. Smith is here!", "It's 10 o'clock.", "one two three four", "whatever"]
    errors, words = word_errors(heard, said)
    assert errors.tolist() == [0, 0, 1, 0]
    assert words[0] == 4 and words[3] == 0


def test_what_is_heard_in_silence_is_put_in():
    errors, words = word_errors(["thank you", ""], ["", "hello there"])
    assert (errors.tolist(), words.tolist()) == ([2, 2], [0, 2])


def test_rates_are_sums_over_sums_and_differences_are_paired():
    said, plain, ours = ["a b c d", "e f"], ["a b c x", "e f"], ["a b c d", "e"]
    resamples = np.array([[1.0, 1.0], [2.0, 0.0]])
    found = word_error_metrics(ours, said, resamples, plain)
    assert found["wer"].value == 100.0 / 6 and found["wer_difference"].value == 0.0
    assert word_error_metrics(plain, [None, None], resamples) == {}
