"""Word error rate of transcripts: jiwer, after Whisper's English normaliser.

Both texts are normalised (case, punctuation, contractions, numbers written out as digits), as in
Radford et al. 2022, Appendix C, without its table of British spellings.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from drafttrain.data.inputs.clips import library
from drafttrain.evaluation.bootstrap import Array, Estimate, Ratio, estimate_ratio


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
