"""Quality of outputs compared with references, and token-by-token comparison of two runs.

BLEU is stored as sentence-level sufficient statistics, as in sacrebleu's paired tests, so a
bootstrap resample costs one sum. Greedy outputs may differ if the target's two highest logits
are equal up to rounding; that is not an error.
"""

from collections.abc import Sequence

import numpy as np
import torch
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from drafttrain.config.base import ConfigError
from drafttrain.data.inputs.clips import library
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.logits_processing import TargetProcessors
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.evaluation.bootstrap import Array, Ratio, Statistic, difference, score
from drafttrain.evaluation.metrics import first_difference
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import GAP_TOLERANCE, Difference, Parity
from drafttrain.models.weight_files import first_line

Texts = Sequence[str]
References = Sequence[str | None]


def text_figures(
    texts: Texts,
    references: References,
    plain: Texts | None = None,
    tokenizer: str = "13a",
    overlap: bool = True,
    consistent: bool = True,
) -> dict[str, Statistic]:
    """Returns BLEU and the F-measures of ROUGE-2 and ROUGE-L (with stemming) over the rows with a
    reference, and BLEU compared with the texts of plain decoding. All in percent.

    overlap: whether to compute BLEU, which counts common n-grams; two good answers in a chat may
    share few words. consistent: whether to compute BLEU against plain decoding, which makes sense
    if both should give the same output.
    """
    figures: dict[str, Statistic] = {}
    present = np.array([float(reference is not None) for reference in references])
    if overlap and present.any():
        figures["bleu"] = bleu(texts, references, tokenizer)
        if plain is not None:
            of_plain = bleu(plain, references, tokenizer)
            figures["bleu_difference"] = difference(figures["bleu"], of_plain)
    if present.any():
        scorer = RougeScorer(["rouge2", "rougeL"], use_stemmer=True)
        pairs = zip(references, texts, strict=True)
        scores = [scorer.score(*pair) if pair[0] is not None else {} for pair in pairs]
        for name in scorer.rouge_types:
            values = [score[name].fmeasure if score else 0.0 for score in scores]
            figures[name] = Ratio(100.0 * np.array(values), present)
    if plain is not None and overlap and consistent:
        figures["consistency_bleu"] = bleu(texts, plain, tokenizer)
    return figures


def bleu_metric(tokenizer: str) -> BLEU:
    """Returns sacrebleu's BLEU. Raises ConfigError for an unknown tokenizer, and for one whose
    package or file is missing."""
    try:
        return BLEU(tokenize=tokenizer, force=True)
    except Exception as error:  # sacrebleu imports or downloads what the tokenizer needs
        raise ConfigError(
            f"bleu_tokenizer = {tokenizer!r} cannot be used ({first_line(error)}); give one of "
            f"{', '.join(BLEU.TOKENIZERS)}"
        ) from error


def bleu(texts: Texts, references: References, tokenizer: str = "13a") -> Statistic:
    """Returns BLEU with sacrebleu's default signature (mixed case, exponential smoothing) from
    sentence-level sufficient statistics; rows without a reference are ignored."""
    metric = bleu_metric(tokenizer)
    present = [i for i, reference in enumerate(references) if reference is not None]
    statistics = metric._extract_corpus_statistics(
        [texts[i] for i in present], [[references[i] for i in present]]
    )
    rows = np.zeros((len(texts), len(statistics[0])))
    rows[present] = statistics
    return score(lambda sums: float(metric._compute_score_from_stats(list(sums)).score), rows)


def word_error_figures(
    texts: Texts, references: References, plain: Texts | None = None
) -> dict[str, Statistic]:
    """Returns `wer`, errors over words of all references in percent; given the texts of plain
    decoding also `wer_difference`, which is negative if these texts are better."""
    errors, words = word_errors(texts, references)
    figures: dict[str, Statistic] = {"wer": Ratio(100.0 * errors, words)}
    if plain is not None:
        more = errors - word_errors(plain, references)[0]
        figures["wer_difference"] = Ratio(100.0 * more, words)
    return figures


def word_errors(texts: Texts, references: References) -> tuple[Array, Array]:
    """Returns the word errors (substitutions, deletions, insertions) and reference words, [P] each.

    Both are 0 for clips without a reference.
    """
    jiwer, normalise = library("jiwer"), EnglishTextNormalizer({})
    errors, words = np.zeros((2, len(texts)))
    for index, (text, reference) in enumerate(zip(texts, references, strict=True)):
        expected, written = normalise(reference or ""), normalise(text)
        words[index] = len(expected.split())
        if expected:
            counts = jiwer.process_words(expected, written)
            errors[index] = counts.substitutions + counts.deletions + counts.insertions
        elif reference is not None:  # jiwer accepts no empty one: all words are insertions
            errors[index] = len(written.split())
    return errors, words


def tie_bound(dtype: torch.dtype, logits: Sequence[float]) -> float:
    """Returns the top-2 logit gap below which rounding explains a difference.

    At least 1e-4, which is the bound of float32 and float64, whose rounding errors come from sums.
    Narrower types round each logit, so the bound is two rounding steps of the highest logit at the
    first differences: in bfloat16 0.31 at 20. (SmolLM2-135M in bfloat16: the highest logits are 25
    in the median; at the first differences of 160 inputs with four methods the gaps were at most
    0.25.)
    """
    largest = max(map(abs, logits), default=0.0)
    return max(GAP_TOLERANCE, 2 * torch.finfo(dtype).eps * largest)


def compare_outputs(
    model: CachedModel,
    prompts: Sequence[Prompt],
    outputs: Sequence[Output],
    others: Sequence[Output],
    max_new_tokens: int,
    against: str,
) -> Parity:
    """Finds the first difference of each output and plain decoding's top-2 logit gap there.

    against: the name of the other run.
    """
    differences, best = [], []
    for prompt, output, expected in zip(prompts, outputs, others, strict=True):
        position = first_difference(output.tokens, expected.tokens)
        if position is not None:
            before = output.tokens[:position]
            first, second = top_two(model, prompt.source, before, max_new_tokens)
            best.append(first)
            differences.append(Difference(row=prompt.row, position=position, gap=first - second))
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
    """Returns plain decoding's two highest logits for the token after `tokens`.

    Repeats plain decoding on `tokens`, one token per call, because calls with more rows may add in
    another order and round differently.
    """
    state = model.encode(source)
    limit = model.max_new_tokens(state.source, max_new_tokens)
    processors = TargetProcessors(model.model, Sampling()).start(state.source, limit)
    committed = state.source.prefix
    nothing = torch.empty(0, dtype=torch.long, device=committed.device)
    for token in tokens:
        model.score([(state, committed, Proposal.empty())])
        model.keep(state, nothing)
        committed = torch.cat([committed, committed.new_tensor([token])])
    [output] = model.score([(state, committed, Proposal.empty())])
    return tuple(processors(committed, nothing, output.logits)[0].topk(2).values.tolist())
