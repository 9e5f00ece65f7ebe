"""Greedy outputs that differ: rounding is told from errors by the top-2 logit gap."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafttrain.build.method import Method
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.calls import StepOutput
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.prompts import EvaluationOptions, read_prompts
from drafttrain.evaluation.quality import compare_outputs, tie_bound, top_two
from drafttrain.evaluation.report import Difference, Parity
from drafttrain.evaluation.runner import decode_by
from tests.evaluation.scripted import loaded
from tests.evaluation.test_batches import TEXTS, rows
from tests.tiny_drafters import noisy
from tests.tiny_models import VOCAB, tiny_model

OPTIONS = EvaluationOptions(max_new_tokens=16)


class Shaky(CachedModel):
    """A target whose logits are off by noise of some size where it scores several sequences."""

    def __init__(self, model, size: float) -> None:
        super().__init__(model)
        noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
        self.noise = size * noise.to(model.dtype)

    def score(self, states, *others) -> list[StepOutput]:
        outputs = super().score(states, *others)
        if len(states) == 1:
            return outputs
        return [replace(output, logits=output.logits + self.noise) for output in outputs]


def compare(model: CachedModel, kind: str, family: str) -> Parity:
    method = Method(NoDrafter(), FixedLength(1), GreedyMatch())
    if kind == "chain":
        drafter = noisy(tiny_model(family), family).to(model.model.dtype)
        method = Method(CausalDrafter(CachedModel(drafter)), FixedLength(3), GreedyMatch())
    prompts, _ = read_prompts(loaded(model.model), model, rows(3 * TEXTS))
    outputs = [decode_by(model, method, prompts, OPTIONS, size) for size in (8, 1)]
    return compare_outputs(model, prompts, *outputs, OPTIONS.max_new_tokens, "batch size 1")


@pytest.mark.parametrize("kind", ["plain", "chain"])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_differences_of_batches_are_ties_in_bfloat16(family, kind):
    parity = compare(CachedModel(tiny_model(family).to(torch.bfloat16)), kind, family)
    assert parity.compared == parity.identical + len(parity.differences) == 24
    assert parity.unexplained == 0 and parity.holds


@pytest.mark.parametrize("kind", ["plain", "chain"])
def test_an_engine_that_is_wrong_in_batches_is_found_out(kind):
    parity = compare(Shaky(tiny_model("llama").float(), 0.3), kind, "llama")
    assert parity.unexplained > 0 and not parity.holds


def test_a_difference_has_its_row_position_and_gap():
    model = CachedModel(tiny_model("llama").float())
    method = Method(NoDrafter(), FixedLength(1), GreedyMatch())
    prompts, _ = read_prompts(loaded(model.model), model, rows())
    plain = decode_by(model, method, prompts, OPTIONS, 1)
    position = len(plain[1].tokens) - 1
    before = plain[1].tokens[:position]
    wrong = [plain[0], replace(plain[1], tokens=[*before, 5]), *plain[2:]]
    parity = compare_outputs(model, prompts, wrong, plain, 16, "plain")
    first, second = top_two(model, prompts[1].source, before, 16)
    assert parity.differences == [Difference(row=1, position=position, gap=first - second)]
    assert (parity.against, parity.compared, parity.identical) == ("plain", 8, 7)


def test_only_gaps_below_the_bound_are_explained():
    differences = [Difference(row=row, position=3, gap=gap) for row, gap in enumerate((2e-7, 4e-2))]
    parity = Parity(against="plain", compared=9, identical=7, differences=differences, bound=1e-5)
    assert parity.unexplained == 1 and not parity.holds
    assert parity.model_copy(update={"bound": 0.1}).holds


def test_ties_are_as_coarse_as_the_targets_type():
    assert tie_bound(torch.float32, [20.0, -31.0]) == tie_bound(torch.bfloat16, []) == 1e-4
    assert tie_bound(torch.bfloat16, [3.0, -20.0]) == 2 * 2**-7 * 20
    assert tie_bound(torch.float16, [20.0]) == 2 * 2**-10 * 20
