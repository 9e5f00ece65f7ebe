"""How outputs compare: with references, and with the target's own, token by token.

BLEU and chrF are kept as sentence-level sufficient statistics, as in sacrebleu's own paired tests,
so that a bootstrap resample costs a sum and not a new count of n-grams. Greedy choices may differ
where the target's two highest logits tie up to rounding, which is told from errors. Of sampled runs
only the number of identical outputs is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from torch import Tensor
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from drafttrain.data.inputs.clips import library
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.sampling import warp
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.evaluation.bootstrap import (
    Array,
    Estimate,
    Ratio,
    estimate_ratio,
    estimate_score,
    estimate_score_difference,
)
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.prompts import EvaluationOptions, Prompt
from drafttrain.evaluation.report import GAP_TOLERANCE, Difference, Parity

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


Judged = dict[tuple[int, tuple[int, ...]], Tensor]
"""Results of `token_probs` by prompt and output: lossless methods have the same ones."""
CHUNK = 64
"""Tokens scored in one call."""
LOGIT_ROUNDINGS = 2
"""Roundings of the target's type, at the size of its logits, within which its two best are a tie.

In bfloat16 the best logits of SmolLM2-135M are 25 in the median, 12 to 39 in nine of ten rows, and
first differences of 160 inputs, by four methods each, had gaps of 0.25 at most.
"""


def tie_bound(dtype: torch.dtype, logits: Sequence[float]) -> float:
    """How near the target's two best logits have to be where rounding is to explain a difference.

    1e-4 of float32 (and float64), as its sums are exact to some roundings of what is added up;
    narrower types round each logit by itself: of bfloat16 0.31 at logits of 20. logits: the best
    ones where outputs part.
    """
    largest = max(map(abs, logits), default=0.0)
    return max(GAP_TOLERANCE, LOGIT_ROUNDINGS * torch.finfo(dtype).eps * largest)


def compare_outputs(
    model: CachedModel,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    others: Sequence[Output],
    max_new_tokens: int,
    against: str,
) -> Parity:
    """Every first difference of two runs, with plain decoding's top-2 logit gap there.

    against: the name of the other run.
    """
    differences, best = [], []
    for prompt, output, expected in zip(prompts, outputs, others, strict=True):
        position = first_difference(output.tokens, expected.tokens)
        if position is not None:
            before = output.tokens[:position]
            first, second = top_two(model, prompt.source, before, max_new_tokens)
            best.append(first)
            gap = first - second
            differences.append(Difference(row=prompt.row, position=position, gap=gap))
    return Parity(
        against=against,
        compared=len(outputs),
        identical=len(outputs) - len(differences),
        differences=differences,
        bound=tie_bound(model.model.dtype, best),
    )


def top_two(
    model: CachedModel, source: Source, tokens: Sequence[int], max_new_tokens: int
) -> tuple[float, float]:
    """Plain decoding's two highest logits at the token after `tokens`.

    Plain decoding is run again along `tokens`, one token a call, so that the logits are those
    that it saw. Small gaps are floating-point ties: other row shapes sum in another order.
    """
    state = model.encode(source)
    limit = model.max_new_tokens(state.source, max_new_tokens)
    processors = TargetProcessors(model.model, Sampling()).start(state.source, limit)
    committed = state.source.prefix
    nothing = torch.empty(0, dtype=torch.long, device=committed.device)
    for token in [*tokens, None]:
        score = model.score([state], [committed], [Proposal.empty()])[0]
        if token is not None:
            model.keep(state, nothing)
            committed = torch.cat([committed, committed.new_tensor([token])])
    logits = processors(committed, nothing, score.logits)[0]
    first, second = logits.topk(2).values.tolist()
    return first, second


def target_agreement(
    model: CachedModel,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    options: EvaluationOptions,
    resamples: Array,
    known: Judged,
) -> Estimate | None:
    """The target's probability of an emitted token after those before it, the mean of all tokens.

    In greedy decoding it is the share of tokens that are the target's own choice, 1 for lossless
    methods. Sampled lossless methods have what plain decoding has, up to randomness. known: no
    output is judged twice.
    """
    judged = []
    for place, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        key = place, tuple(output.tokens)
        if key not in known:
            known[key] = token_probs(
                model, prompt.source, output.tokens, options.sampling, options.max_new_tokens
            )
        judged.append(known[key])
    sums = np.array([float(probs.sum()) for probs in judged])
    counts = np.array([float(len(probs)) for probs in judged])
    return estimate_ratio(Ratio(sums, counts), resamples)


@torch.inference_mode()
def token_probs(
    model: CachedModel,
    source: Source,
    tokens: Sequence[int],
    sampling: Sampling,
    max_new_tokens: int,
) -> Tensor:
    """The target's probability of each token of an output, given those before it. Shape: [L]."""
    state = model.encode(source)
    process = model.processors(sampling).start(
        state.source, model.max_new_tokens(state.source, max_new_tokens)
    )
    committed, found = state.source.prefix.cpu(), [torch.empty(0, dtype=torch.float64)]
    for chunk in torch.tensor(tokens, dtype=torch.long).split(CHUNK):
        fed = Proposal.chain(chunk[:-1])
        [output] = model.score([state], [committed], [fed])
        probs = warp(process(committed, fed.tokens, output.logits, fed.parents), sampling).cpu()
        found.append(probs.gather(1, chunk[:, None])[:, 0].double())
        model.keep(state, torch.arange(len(chunk) - 1))
        committed = torch.cat((committed, chunk))
    return torch.cat(found)
