"""Scores equal those of the libraries; rounding is distinguished from errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU

from drafttrain.config.decode import SamplingConfig
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.requests import ForwardOutput
from drafttrain.evaluation.bootstrap import draw_resamples, estimate, estimate_all
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.quality import (
    bleu,
    compare_outputs,
    text_figures,
    tie_bound,
    top_two,
    word_error_figures,
    word_errors,
)
from drafttrain.evaluation.report import Difference, Parity
from drafttrain.evaluation.runner import decode_by, plain_method
from tests.decoding.engine.fresh import fresh
from tests.evaluation.scripted import chain, loaded, rows
from tests.evaluation.test_batches import TEXTS
from tests.tiny_drafters import noisy
from tests.tiny_models import VOCAB, tiny_model

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


def test_bleu_and_its_interval_equal_scoring_each_resampled_corpus_anew():
    resamples = draw_resamples(4, 50, seed=2)
    expected = []
    for draws in (resamples := np.vstack([np.ones((1, 4)), resamples])):
        chosen = [i for i, times in enumerate(draws) for _ in range(int(times))]
        score = BLEU().corpus_score([GOOD[i] for i in chosen], [[REFERENCES[i] for i in chosen]])
        expected.append(score.score)
    assert bleu(GOOD, REFERENCES)(resamples) == pytest.approx(expected)


def test_rows_without_a_reference_change_no_score():
    with_gap = scores([*GOOD, "whatever"], [*REFERENCES, None])
    without = scores(GOOD, REFERENCES)
    for name, found in without.items():
        assert with_gap[name].value == pytest.approx(found.value)
    assert text_figures(GOOD, [None] * 4) == {}


def test_a_perfect_output_scores_100_and_an_empty_one_0():
    for texts, score in ((REFERENCES, 100.0), ([""] * 4, 0.0)):
        values = [one.value for one in scores(texts, REFERENCES).values()]
        assert values == pytest.approx([score] * 3)  # BLEU, ROUGE-2, ROUGE-L


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
    references = ["mister smith is here", "it is ten o'clock", "one two three", None]
    transcripts = ["Mr. Smith is here!", "It's 10 o'clock.", "one two three four", "whatever"]
    errors, words = word_errors(transcripts, references)
    assert errors.tolist() == [0, 0, 1, 0]
    assert words[0] == 4 and words[3] == 0
    errors, words = word_errors(["thank you", ""], ["", "hello there"])
    assert (errors.tolist(), words.tolist()) == ([2, 2], [0, 2])  # words in silence are insertions


def test_rates_are_sums_over_sums_and_differences_are_paired():
    references, plain, ours = ["a b c d", "e f"], ["a b c x", "e f"], ["a b c d", "e"]
    resamples = np.array([[1.0, 1.0], [2.0, 0.0]])
    found = estimate_all(word_error_figures(ours, references, plain), resamples)
    assert found["wer"].value == 100.0 / 6 and found["wer_difference"].value == 0.0
    assert estimate_all(word_error_figures(plain, [None, None]), resamples) == {}


SAMPLING = SamplingConfig(max_new_tokens=16)


class Shaky(CachedModel):
    """A target whose logits have noise of a given size if it scores several sequences."""

    def __init__(self, model, size: float) -> None:
        super().__init__(model)
        noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
        self.noise = size * noise.to(model.dtype)

    def score(self, drafts, *others) -> list[ForwardOutput]:
        outputs = super().score(drafts, *others)
        if len(drafts) == 1:
            return outputs
        return [replace(output, logits=output.logits + self.noise) for output in outputs]


def compare(model: CachedModel, kind: str, family: str) -> Parity:
    drafter = noisy(tiny_model(family), family).to(model.model.dtype)
    method = chain(drafter) if kind == "chain" else plain_method(SAMPLING)
    prompts, _ = read_prompts(loaded(model.model), rows(TEXTS))
    outputs = [decode_by(model, method, SAMPLING, prompts, size) for size in (8, 1)]
    return compare_outputs(model, prompts, *outputs, 16, "batch size 1")


@pytest.mark.covered
@pytest.mark.parametrize("kind", ["plain", "chain"])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_differences_of_batches_are_ties_in_bfloat16(family, kind):
    parity = compare(CachedModel(tiny_model(family).to(torch.bfloat16)), kind, family)
    assert parity.compared == parity.identical + len(parity.differences) == 8
    assert parity.unexplained == 0


@pytest.mark.parametrize("kind", ["plain", "chain"])
def test_an_engine_that_is_wrong_in_batches_is_detected(kind):
    parity = compare(Shaky(tiny_model("llama").float(), 0.3), kind, "llama")
    assert parity.unexplained > 0


def test_a_difference_has_its_row_position_and_gap():
    model = CachedModel(tiny_model("llama").float())
    method = plain_method(SAMPLING)
    prompts, _ = read_prompts(loaded(model.model), rows(TEXTS))
    plain = decode_by(model, method, SAMPLING, prompts)
    position = len(plain[1].tokens) - 1
    before = plain[1].tokens[:position]
    wrong = [plain[0], replace(plain[1], tokens=[*before, 5]), *plain[2:]]
    parity = compare_outputs(model, prompts, wrong, plain, 16, "plain")
    first, second = top_two(model, prompts[1].source, before, 16)
    assert parity.differences == [Difference(row=11, position=position, gap=first - second)]
    assert (parity.against, parity.compared, parity.identical) == ("plain", 8, 7)


def test_ties_are_as_coarse_as_the_targets_type():
    assert tie_bound(torch.float32, [20.0, -31.0]) == tie_bound(torch.bfloat16, []) == 1e-4
    assert tie_bound(torch.bfloat16, [3.0, -20.0]) == 2 * 2**-7 * 20
    assert tie_bound(torch.float16, [20.0]) == 2 * 2**-10 * 20


@pytest.mark.parametrize("family", ["marian", "gpt2"])
def test_the_gap_at_a_difference_is_plain_decodings_own(family):
    target = loaded(tiny_model(family))
    [prompt, *_], _ = read_prompts(target, rows(TEXTS))
    source = prompt.source
    logits = fresh(target.target.model, source, [*source.prefix.tolist(), 9, 11]).logits[0, -1]
    expected = logits.topk(2).values.tolist()
    assert top_two(target.model, source, [9, 11], 12) == pytest.approx(expected, abs=1e-9)
