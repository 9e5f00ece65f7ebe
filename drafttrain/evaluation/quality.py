"""Quality of decoded texts: BLEU and chrF (sacrebleu), ROUGE (rouge-score), word errors (jiwer).

BLEU and chrF are kept as sentence-level sufficient statistics, the way sacrebleu's own paired
tests do, so that a bootstrap resample costs a sum and not a new count of n-grams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from drafttrain.data.inputs.clips import library
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    estimate_ratio,
    estimate_score,
    estimate_score_difference,
)

Texts = Sequence[str]
References = Sequence[str | None]


@dataclass(frozen=True)
class CorpusStatistics:
    """Sufficient statistics of a corpus score. Rows without a reference are zero."""

    metric: Metric
    rows: Array
    """[P, S], one row for each sentence."""

    def score(self, summed: Array) -> float:
        """The score of summed statistics. Shapes: summed [S]."""
        return float(self.metric._compute_score_from_stats(list(summed)).score)

    def estimate(self, resamples: Array) -> Estimate:
        return estimate_score(self.score, self.rows, resamples)

    def difference(self, other: CorpusStatistics, resamples: Array) -> Estimate:
        """Paired difference to another system on the same references; positive: ours is better."""
        return estimate_score_difference(self.score, self.rows, other.rows, resamples)


def bleu_statistics(
    hypotheses: Texts, references: References, tokenizer: str = "13a"
) -> CorpusStatistics:
    """BLEU of sacrebleu's default signature (mixed case, exponential smoothing)."""
    return _statistics(BLEU(tokenize=tokenizer, force=True), hypotheses, references)


def chrf_statistics(hypotheses: Texts, references: References) -> CorpusStatistics:
    """chrF of sacrebleu's default signature (6 character orders, no word order)."""
    return _statistics(CHRF(), hypotheses, references)


def quality_metrics(
    hypotheses: Texts,
    references: References,
    resamples: Array,
    tokenizer: str = "13a",
    overlap: bool = True,
) -> dict[str, Estimate]:
    """BLEU, chrF, ROUGE-2, ROUGE-L and exact match over the rows that have a reference.

    Empty where no row has one. Scores are in percent. overlap: whether BLEU and chrF, the shares of
    common n-grams, mean anything for these texts.
    """
    present = [i for i, reference in enumerate(references) if reference is not None]
    if not present:
        return {}
    estimates: dict[str, Estimate] = {}
    if overlap:
        estimates |= {
            "bleu": bleu_statistics(hypotheses, references, tokenizer).estimate(resamples),
            "chrf": chrf_statistics(hypotheses, references).estimate(resamples),
        }
    has_reference = np.zeros(len(references))
    has_reference[present] = 1.0
    scores = rouge_scores(hypotheses, references)
    scores["exact_match"] = exact_match(hypotheses, references)
    for name, values in scores.items():
        estimates[name] = estimate_ratio(Ratio(100.0 * values, has_reference), resamples)
    return estimates


def rouge_scores(hypotheses: Texts, references: References) -> dict[str, Array]:
    """F-measures of ROUGE-2 and ROUGE-L with stemming, in 0..1; 0 without a reference."""
    names = ["rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    scores = {name: np.zeros(len(hypotheses)) for name in names}
    for i, (hypothesis, reference) in enumerate(zip(hypotheses, references, strict=True)):
        if reference is not None:
            found = scorer.score(reference, hypothesis)
            for name in names:
                scores[name][i] = found[name].fmeasure
    return scores


def exact_match(hypotheses: Texts, references: References) -> Array:
    """1 where text and reference agree but for white space at the ends. Shapes: -> [P]."""
    pairs = zip(hypotheses, references, strict=True)
    return np.array([float(b is not None and a.strip() == b.strip()) for a, b in pairs])


def _statistics(metric: Metric, hypotheses: Texts, references: References) -> CorpusStatistics:
    present = [i for i, reference in enumerate(references) if reference is not None]
    if not present:
        raise ValueError("no row has a reference: BLEU and chrF need at least one")
    found = metric._extract_corpus_statistics(
        [hypotheses[i] for i in present], [[references[i] for i in present]]
    )
    rows = np.zeros((len(hypotheses), len(found[0])))
    rows[present] = found
    return CorpusStatistics(metric, rows)


def word_error_metrics(
    texts: Sequence[str],
    references: Sequence[str | None],
    resamples: Array,
    plain: Sequence[str] | None = None,
) -> dict[str, Estimate]:
    """`wer` in percent, errors over words of all references together; where the texts of plain
    decoding are given, `wer_difference` too, paired by clip: below 0, ours are better.

    Empty where no clip has a reference.
    """
    errors, words = word_errors(texts, references)
    found = {"wer": estimate_ratio(Ratio(100.0 * errors, words), resamples)}
    if plain is not None:
        more = errors - word_errors(plain, references)[0]
        found["wer_difference"] = estimate_ratio(Ratio(100.0 * more, words), resamples)
    return {name: estimate for name, estimate in found.items() if estimate is not None}


def word_errors(texts: Sequence[str], references: Sequence[str | None]) -> tuple[Array, Array]:
    """Words substituted, left out and put in, and words of the reference; two [P].

    Clips without a reference have none of either.
    """
    jiwer, normalise = library("jiwer"), EnglishTextNormalizer({})
    errors, words = np.zeros(len(texts)), np.zeros(len(texts))
    for place, (text, reference) in enumerate(zip(texts, references, strict=True)):
        if reference is None:
            continue
        said, heard = normalise(reference), normalise(text)
        words[place] = len(said.split())
        if not said:  # jiwer takes no empty reference: all that was heard was put in
            errors[place] = len(heard.split())
            continue
        counts = jiwer.process_words(said, heard)
        errors[place] = counts.substitutions + counts.deletions + counts.insertions
    return errors, words
