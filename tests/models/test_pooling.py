"""Means of neighbouring encoder states, hand-computed and with padding."""

import pytest
import torch

from drafttrain.models.spec_drafter.pooling import group_means
from tests.comparing import close


def test_means_by_hand():
    states = torch.tensor([[1.0, 10], [3, 30], [5, 0], [8, 1], [4, 2]], dtype=torch.float64)
    close(group_means(states, 2)[0], torch.tensor([[2.0, 20], [6.5, 0.5], [4, 2]]).double())
    close(group_means(states, 9)[0], torch.tensor([[4.2, 8.6]], dtype=torch.float64))
    assert group_means(states, 1)[0] is states


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_padding_is_in_no_mean(size):
    torch.manual_seed(0)
    lengths = [5, 2, 6]
    states = torch.randn(3, 6, 4, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    means, there = group_means(states, size, mask)
    for own, groups, line, length in zip(means, there, states, lengths, strict=True):
        close(own[groups], group_means(line[:length], size)[0])
        assert groups.sum() == -(-length // size)


def test_means_of_keys_are_keys_of_means():
    torch.manual_seed(0)
    states, keys = torch.randn(7, 4).double(), torch.nn.Linear(4, 6).double()
    close(group_means(keys(states), 3)[0], keys(group_means(states, 3)[0]))
