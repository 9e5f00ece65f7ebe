"""Scores equal the libraries' own; word errors by hand; differences carry the right sign."""

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from drafttrain.evaluation.bootstrap import draw_resamples, estimate, estimate_all
from drafttrain.evaluation.quality import bleu, text_figures, word_error_figures, word_errors

REFERENCES = [
    "the cat sat on the mat",
    "a dog runs in the park",
    "two men play chess outside",
    "a woman reads a long book",
]
GOOD = ["the cat sat on the mat", "a dog runs in a park", "two men play chess", REFERENCES[3]]
BAD = ["a cat on mat", "dogs ran in the park", "two men play chess", "the woman reads a book"]


def scores(texts, references, *plain):
    resamples = draw_resamples(len(texts), 10)
    return estimate_all(text_figures(texts, references, *plain), resamples)


def test_bleu_and_chrf_equal_the_corpus_scores_of_sacrebleu():
    found = scores(GOOD, REFERENCES)
    assert found["bleu"].value == pytest.approx(BLEU().corpus_score(GOOD, [REFERENCES]).score)
    assert found["chrf"].value == pytest.approx(CHRF().corpus_score(GOOD, [REFERENCES]).score)


def test_the_bleu_interval_equals_scoring_each_resampled_corpus_anew():
    resamples = draw_resamples(4, 50, seed=2)
    expected = []
    for draws in resamples:
        chosen = [i for i, times in enumerate(draws) for _ in range(int(times))]
        score = BLEU().corpus_score([GOOD[i] for i in chosen], [[REFERENCES[i] for i in chosen]])
        expected.append(score.score)
    assert bleu(GOOD, REFERENCES)(resamples) == pytest.approx(expected)


def test_exact_match_and_rouge_of_a_perfect_output_are_100():
    found = scores(REFERENCES, REFERENCES)
    assert found["exact_match"].value == 100.0
    assert found["rouge2"].value == pytest.approx(100.0)
    assert found["rougeL"].value == pytest.approx(100.0)


def test_rows_without_a_reference_change_no_score():
    with_gap = scores([*GOOD, "whatever"], [*REFERENCES, None])
    without = scores(GOOD, REFERENCES)
    for name, found in without.items():
        assert with_gap[name].value == pytest.approx(found.value)


def test_without_any_reference_there_are_no_scores():
    assert text_figures(GOOD, [None] * 4) == {}


def test_an_empty_output_scores_zero():
    found = scores(["", ""], REFERENCES[:2])
    assert found["bleu"].value == 0.0
    assert found["rougeL"].value == 0.0


def test_the_paired_bleu_difference_is_positive_for_the_better_system_and_antisymmetric():
    resamples = draw_resamples(4, 200)
    ours, theirs, same = (
        estimate(text_figures(a, REFERENCES, b)["bleu_difference"], resamples)
        for a, b in ((GOOD, BAD), (BAD, GOOD), (GOOD, GOOD))
    )
    assert ours.value > 0
    assert theirs.value == pytest.approx(-ours.value)
    assert theirs.low == pytest.approx(-ours.high)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


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
    found = estimate_all(word_error_figures(ours, said, plain), resamples)
    assert found["wer"].value == 100.0 / 6 and found["wer_difference"].value == 0.0
    assert estimate_all(word_error_figures(plain, [None, None]), resamples) == {}
