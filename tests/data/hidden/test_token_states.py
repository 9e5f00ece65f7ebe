"""Distribution of draft tokens, labels as acceptance probabilities, and shares of mixes."""

import numpy as np
import pytest
import torch

from drafttrain.data.hidden.labels import mix_tokens, row_uniforms
from drafttrain.decoding.sampling import draw_tokens, warp
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import acceptance_probability

TARGET = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
DRAFT = torch.tensor([[0.0, 0.8, 0.2, 0.0], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
"""In the first row neither support contains the other."""


def test_labels_by_hand_where_supports_do_not_contain_each_other():
    first = acceptance_probability(TARGET, DRAFT, torch.tensor([1, 0]))
    second = acceptance_probability(TARGET, DRAFT, torch.tensor([2, 3]))
    assert first.tolist() == [0.625, 0.25] and second.tolist() == [0.0, 1.0]


def test_a_number_picks_the_token_in_whose_share_it_falls():
    numbers = torch.tensor([[0.0, 0.79, 0.81, 0.999999], [0.39, 0.41, 0.69, 0.95]])
    assert draw_tokens(DRAFT, numbers.double()).tolist() == [[1, 1, 2, 2], [0, 1, 1, 3]]


def test_a_token_of_probability_zero_is_never_drawn():
    edge = torch.tensor([[0.0, np.nextafter(1.0, 0.0)]], dtype=torch.float64)
    for row in ([0.0, 1.0, 0.0], [0.0, 0.3, 0.7], [0.7, 0.3, 0.0]):
        probs = torch.tensor([row])
        assert probs[0, draw_tokens(probs, edge)[0]].gt(0).all()
    thirds = torch.full((1, 3), 1 / 3)  # sums to less or more than 1
    assert draw_tokens(torch.cat([thirds, torch.zeros(1, 2)], 1), edge).tolist() == [[0, 2]]


def test_tokens_follow_the_draft():
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens = draw_tokens(DRAFT, grid.expand(2, -1))
    shares = [torch.bincount(row, minlength=4) / 1000 for row in tokens]
    assert torch.allclose(torch.stack(shares).double(), DRAFT)


def test_greedy_labels_are_zero_or_one():
    target = warp(torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 1.0]]), Sampling())
    draft = warp(torch.tensor([[9.0, 8.0, 7.0], [1.0, 2.0, 3.0]]), Sampling())
    [mixed] = mix_tokens(torch.tensor([0, 1]), target, draft, 0.0, uniforms(1, 2))
    assert mixed.tokens.tolist() == [0, 2]  # the drafter's arg-max
    assert mixed.acceptance.tolist() == [1.0, 0.0]


def uniforms(mixes: int, length: int, seed: int = 0) -> torch.Tensor:
    numbers = [row_uniforms(seed, mix, 7, length) for mix in range(mixes)]
    return torch.from_numpy(np.stack(numbers))


def test_the_mean_label_is_one_minus_the_total_variation():
    """E_Y min(1, target / draft) = sum_v min(target, draft) for the warped distributions."""
    torch.manual_seed(0)
    sampling = Sampling(temperature=0.8, top_k=6)
    target, draft = (warp(torch.randn(5, 12).double(), sampling) for _ in range(2))
    expected = torch.minimum(target, draft).sum(-1)
    assert torch.allclose(expected, 1 - (target - draft).abs().sum(-1) / 2)
    mixes = mix_tokens(torch.zeros(5, dtype=torch.long), target, draft, 0.0, uniforms(4000, 5))
    labels = torch.stack([mixed.acceptance for mixed in mixes])
    error = labels.std(0) / len(labels) ** 0.5
    assert ((labels.mean(0) - expected).abs() < 4 * error).all()


@pytest.mark.parametrize("keep", [0.0, 0.15, 0.5, 1.0])
def test_mixes_keep_the_set_share_of_the_output(keep):
    output = torch.full((400,), 3)  # a token that this drafter never proposes
    draft = torch.tensor([0.5, 0.25, 0.25, 0.0]).expand(400, -1)
    mixes = mix_tokens(output, draft, draft, keep, uniforms(20, 400))
    drafted = torch.stack([mixed.drafted for mixed in mixes])
    tokens = torch.stack([mixed.tokens for mixed in mixes])
    assert torch.equal(tokens != 3, drafted)
    spread = (keep * (1 - keep) / drafted.numel()) ** 0.5
    assert abs(1 - drafted.double().mean() - keep) <= 4 * spread
    assert all(torch.equal(mixed.acceptance, torch.ones(400)) for mixed in mixes)


def test_random_numbers_depend_only_on_seed_mix_row_and_position():
    long, short = row_uniforms(5, 1, 9, 12), row_uniforms(5, 1, 9, 4)
    assert np.array_equal(long[:4], short)
    others = [row_uniforms(6, 1, 9, 4), row_uniforms(5, 0, 9, 4), row_uniforms(5, 1, 8, 4)]
    assert not any(np.array_equal(short, other) for other in others)


def test_labels_are_those_of_the_output_and_not_of_the_mix():
    """Row i of draft and target depends on X_1..X_{i-1}, whatever tokens Z has there."""
    first, second = mix_tokens(torch.tensor([0, 0]), TARGET, DRAFT, 0.9, uniforms(2, 2))
    for mixed in (first, second):
        kept = mixed.tokens.where(mixed.drafted, torch.tensor([1, 1]))
        expected = acceptance_probability(TARGET, DRAFT, kept)
        assert torch.equal(mixed.acceptance[mixed.drafted], expected[mixed.drafted])
