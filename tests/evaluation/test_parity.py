"""Sampled outputs of batches: differences that rounding explains are told from errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafttrain.build.method import Method
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.calls import StepOutput
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.trees.drawn import Branching
from drafttrain.decoding.trees.verifiers import RecursiveRejection
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import RejectionSampling
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.parity import compare_draws, draw_bound, tie_bound
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.report import Parity
from drafttrain.evaluation.runner import decode_by, make_waves
from tests.evaluation.batches.test_measure import TEXTS, rows
from tests.evaluation.scripted import loaded
from tests.tiny_drafters import noisy
from tests.tiny_models import VOCAB, tiny_model

OPTIONS = EvaluationOptions(sampling=Sampling(1.0), max_new_tokens=16)


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


def method_of(kind: str, family: str, dtype: torch.dtype) -> Method:
    if kind == "plain":
        return Method(NoDrafter(), FixedLength(1), RejectionSampling())
    drafter = CausalDrafter(CachedModel(noisy(tiny_model(family), family).to(dtype)))
    if kind == "chain":
        return Method(drafter, FixedLength(3), RejectionSampling())
    return Method(TreeDrafter(drafter, Branching((2, 2))), FixedLength(2), RecursiveRejection)


def compare(model: CachedModel, method: Method, batch_size: int, repeated: int = 1) -> Parity:
    prompts, _ = read_prompts(loaded(model.model), model, rows(repeated * TEXTS))
    waves = make_waves(len(prompts), batch_size, OPTIONS.wave_batches)
    together = [
        output
        for wave in waves
        for output in decode_by(model, method, [prompts[i] for i in wave], OPTIONS, batch_size)
    ]
    alone = decode_by(model, method, prompts, OPTIONS, 1)
    return compare_draws(model, method, prompts, together, alone, OPTIONS, batch_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "marian"])
def test_all_that_batches_of_the_engine_change_is_a_draw_at_a_boundary(family, kind, dtype):
    """In bfloat16 a few rows of eight differ; in float32 hardly ever one."""
    model = CachedModel(tiny_model(family).to(dtype))
    for batch_size in (3, 8):
        parity = compare(model, method_of(kind, family, dtype), batch_size)
        assert parity.compared == parity.identical + len(parity.differences) == 8
        assert parity.unexplained == 0 and parity.holds


def on_boundaries(self: SampledRandomness, like: Tensor) -> Tensor:
    """Variates that lie where uniform rows of the vocabulary change from token to token."""
    drawn = torch.rand(like.shape, dtype=like.dtype, generator=self.generator)
    return (drawn * VOCAB).round() / VOCAB


def test_draws_at_boundaries_are_explained(monkeypatch):
    monkeypatch.setattr(SampledRandomness, "uniform", on_boundaries)
    target = tiny_model("llama").float()
    target.lm_head.weight.data.zero_()  # every row is uniform
    parity = compare(Shaky(target, 1e-6), method_of("plain", "llama", torch.float32), 3)
    assert parity.identical < 4, "variates lie where the least noise counts"
    assert parity.unexplained == 0 and max(parity.gaps) < 1e-6


@pytest.mark.parametrize("kind", ["plain", "chain", "tree"])
@pytest.mark.parametrize("batch_size", [3, 8])
def test_an_engine_that_is_wrong_in_batches_is_found_out(kind, batch_size):
    model = Shaky(tiny_model("llama").float(), 1e-2)
    parity = compare(model, method_of(kind, "llama", torch.float32), batch_size, repeated=8)
    assert parity.unexplained > 0 and not parity.holds


def test_ties_are_as_coarse_as_the_targets_type():
    assert tie_bound(torch.float32, [20.0, -31.0]) == tie_bound(torch.bfloat16, []) == 1e-4
    assert tie_bound(torch.bfloat16, [3.0, -20.0]) == 2 * 2**-7 * 20
    assert tie_bound(torch.float16, [20.0]) == 2 * 2**-10 * 20


def test_a_difference_that_is_not_seen_again_is_not_explained():
    model = CachedModel(tiny_model("llama").float())
    method = method_of("plain", "llama", torch.float32)
    prompts, _ = read_prompts(loaded(model.model), model, rows())
    alone = decode_by(model, method, prompts, OPTIONS, 1)
    wrong = [replace(alone[0], tokens=[*alone[0].tokens[:-1], 5]), *alone[1:]]
    [difference] = compare_draws(model, method, prompts, wrong, alone, OPTIONS, 3).differences
    assert (difference.row, difference.position) == (0, len(alone[0].tokens) - 1)
    assert difference.gap is None


def test_the_bound_is_a_multiple_of_rounding():
    assert draw_bound(torch.float32) == draw_bound(torch.float64) == 128 * 2.0**-23
    assert draw_bound(torch.bfloat16) == 8 * 2.0**-7
