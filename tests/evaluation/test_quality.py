"""Scores equal the libraries' own; word errors by hand; differences carry the right sign."""

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from drafttrain.evaluation.bootstrap import draw_resamples
from drafttrain.evaluation.quality import (
    bleu_statistics,
    quality_metrics,
    word_error_metrics,
    word_errors,
)

REFERENCES = [
    "the cat sat on the mat",
    "a dog runs in the park",
    "two men play chess outside",
    "a woman reads a long book",
]
GOOD = ["the cat sat on the mat", "a dog runs in a park", "two men play chess", REFERENCES[3]]
BAD = ["a cat on mat", "dogs ran in the park", "two men play chess", "the woman reads a book"]


def test_bleu_and_chrf_equal_the_corpus_scores_of_sacrebleu():
    found = quality_metrics(GOOD, REFERENCES, draw_resamples(4, 10))
    assert found["bleu"].value == pytest.approx(BLEU().corpus_score(GOOD, [REFERENCES]).score)
    assert found["chrf"].value == pytest.approx(CHRF().corpus_score(GOOD, [REFERENCES]).score)


def test_the_bleu_interval_equals_scoring_each_resampled_corpus_anew():
    resamples = draw_resamples(4, 50, seed=2)
    scores = []
    for draws in resamples:
        chosen = [i for i, times in enumerate(draws) for _ in range(int(times))]
        score = BLEU().corpus_score([GOOD[i] for i in chosen], [[REFERENCES[i] for i in chosen]])
        scores.append(score.score)
    statistics = bleu_statistics(GOOD, REFERENCES)
    assert [statistics.score(summed) for summed in resamples @ statistics.rows] == pytest.approx(
        scores
    )


def test_exact_match_and_rouge_of_a_perfect_output_are_100():
    found = quality_metrics(REFERENCES, REFERENCES, draw_resamples(4, 10))
    assert found["exact_match"].value == 100.0
    assert found["rouge2"].value == pytest.approx(100.0)
    assert found["rougeL"].value == pytest.approx(100.0)


def test_rows_without_a_reference_change_no_score():
    with_gap = quality_metrics(
        [*GOOD, "whatever"], [*REFERENCES, None], draw_resamples(5, 10, seed=0)
    )
    without = quality_metrics(GOOD, REFERENCES, draw_resamples(4, 10))
    for name, estimate in without.items():
        assert with_gap[name].value == pytest.approx(estimate.value)


def test_without_any_reference_there_are_no_scores():
    assert quality_metrics(GOOD, [None] * 4, draw_resamples(4, 10)) == {}
    with pytest.raises(ValueError, match="no row has a reference"):
        bleu_statistics(GOOD, [None] * 4)


def test_an_empty_output_scores_zero():
    found = quality_metrics(["", ""], REFERENCES[:2], draw_resamples(2, 10))
    assert found["bleu"].value == 0.0
    assert found["rougeL"].value == 0.0


def test_the_paired_bleu_difference_is_positive_for_the_better_system_and_antisymmetric():
    resamples = draw_resamples(4, 200)
    good, bad = bleu_statistics(GOOD, REFERENCES), bleu_statistics(BAD, REFERENCES)
    ours, theirs = good.difference(bad, resamples), bad.difference(good, resamples)
    assert ours.value > 0
    assert theirs.value == pytest.approx(-ours.value)
    assert theirs.low == pytest.approx(-ours.high)


def test_a_system_does_not_differ_from_itself():
    good = bleu_statistics(GOOD, REFERENCES)
    difference = good.difference(good, draw_resamples(4, 50))
    assert (difference.value, difference.low, difference.high) == (0.0, 0.0, 0.0)


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
