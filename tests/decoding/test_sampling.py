"""Warping equals Transformers', and the production random source follows the given rows."""

from itertools import accumulate
from operator import mul

import pytest
import torch

from drafttrain.decoding.sampling import SampledRandomness, likeliest, warp
from drafttrain.decoding.types import Sampling
from tests.comparing import close
from tests.decoding.enumeration import enumerate_law
from tests.decoding.expected import expected_probs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.3, 1.0])
def test_warping_equals_the_warpers_of_transformers(dtype, temperature, top_k, top_p, min_p):
    logits = torch.randn(20, 12, dtype=dtype, generator=torch.Generator().manual_seed(0))
    logits[3:6] = logits[3:6].round()  # ties
    logits[6:9, ::2] = -torch.inf  # tokens excluded by a processor
    sampling = Sampling(temperature, top_k, top_p, min_p)
    expected = expected_probs(logits, sampling).to(dtype)
    close(warp(logits, sampling), expected, 1e-6 if dtype == torch.float32 else 1e-12)


def test_temperature_zero_is_the_point_mass_on_the_first_arg_max():
    probs = warp(torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 0.0]]), Sampling(temperature=0.0))
    assert probs.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_half_precision_is_warped_in_float32_and_float64_is_kept():
    for given, found in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert warp(torch.zeros(1, 4, dtype=given), Sampling(0.7)).dtype == found


def test_sure_and_impossible_events_are_never_mistaken():
    randomness = SampledRandomness(torch.Generator().manual_seed(0))
    for _ in range(200):
        assert randomness.accept_run(torch.tensor([1.0, 1.0, 0.0, 1.0])) == 2
        assert randomness.categorical(torch.tensor([[0.0, 1.0], [1.0, 0.0]])).tolist() == [1, 0]
    assert randomness.accept_run(torch.empty(0)) == 0


RUNS = [[0.9, 0.5, 0.8], [0.4, 0.6, 0.95, 0.7], [0.3], [1.0, 0.5, 0.5]]
"""Acceptance probabilities of runs."""


def run_law(probs: list[float]) -> list[float]:
    """Returns the probabilities of runs of 0, 1, ..., N independent successes."""
    reached = list(accumulate(probs, mul, initial=1.0))
    return [whole * (1.0 - p) for whole, p in zip(reached, probs, strict=False)] + reached[-1:]


@pytest.mark.parametrize("probs", RUNS, ids=str)
def test_events_of_a_run_are_independent(probs):
    """Each event has its own uniform value; a shared one would make long runs too frequent."""
    randomness, runs = SampledRandomness(torch.Generator().manual_seed(0)), 8000
    events, law = torch.tensor(probs), run_law(probs)
    lengths = torch.tensor([randomness.accept_run(events) for _ in range(runs)])
    shares = (torch.bincount(lengths, minlength=len(law)) / runs).tolist()
    for share, expected in zip(shares, law, strict=True):
        assert abs(share - expected) <= 5 * (expected * (1 - expected) / runs) ** 0.5
    exact = enumerate_law(lambda randomness: randomness.accept_run(events.double()))
    assert exact == pytest.approx({n: p for n, p in enumerate(law) if p > 0}, abs=1e-6)


def test_successive_runs_are_independent():
    randomness, runs = SampledRandomness(torch.Generator().manual_seed(1)), 8000
    event = torch.tensor([0.5])
    drawn = torch.tensor([randomness.accept_run(event) for _ in range(2 * runs)]).view(runs, 2)
    pairs = torch.bincount(drawn @ torch.tensor([2, 1]), minlength=4) / runs
    assert ((pairs - 0.25).abs() <= 5 * (0.25 * 0.75 / runs) ** 0.5).all()


def test_the_same_seed_gives_the_same_choices():
    def choices(seed: int) -> list[int]:
        randomness = SampledRandomness(torch.Generator().manual_seed(seed))
        return [int(randomness.categorical(torch.full((1, 50), 0.02))) for _ in range(20)]

    assert choices(1) == choices(1) != choices(2)


def test_drawn_tokens_have_the_law_of_their_rows_and_impossible_ones_never_come():
    probs = torch.tensor([[0.0, 0.2, 0.0, 0.5, 0.3, 0.0], [0.6, 0.0, 0.0, 0.0, 0.0, 0.4]])
    randomness, runs = SampledRandomness(torch.Generator().manual_seed(0)), 4000
    for row in probs:
        drawn = randomness.categorical(row.expand(runs, -1))
        shares = torch.bincount(drawn, minlength=6) / runs
        assert (shares[row == 0] == 0).all()
        assert ((shares - row).abs() <= 5 * (row * (1 - row) / runs).sqrt()).all()


def test_rows_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        SampledRandomness(torch.Generator()).categorical(torch.tensor([[0.5, torch.nan]]))


@pytest.mark.parametrize("vocabulary", [5, 64, 700, 703])
def test_the_likeliest_tokens_are_those_of_topk(vocabulary):
    scores = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0))
    values, tokens = likeliest(scores, 40)
    expected = scores.topk(min(40, vocabulary), dim=-1)
    assert torch.equal(values, expected.values) and torch.equal(tokens, expected.indices)
