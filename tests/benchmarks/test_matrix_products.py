"""The products of a training step are all counted, at the sizes they are computed at."""

from __future__ import annotations

from time import perf_counter

import torch

from benchmarks.matrix_products import ProductCounter, seconds_alone


def test_a_linear_layer_costs_one_product_forward_and_two_backward() -> None:
    layer = torch.nn.Linear(5, 7)
    x = torch.randn(3, 5, requires_grad=True)
    with ProductCounter() as products:
        layer(x).sum().backward()
    assert products.flops == 3 * (2 * 3 * 5 * 7)
    assert sum(products.counts.values()) == 3
    assert all(product.touches(7) and product.touches(3) for product in products.counts)


def test_batched_products_count_once_for_each_of_the_batch() -> None:
    with ProductCounter() as products:
        torch.bmm(torch.randn(4, 2, 3), torch.randn(4, 3, 5))
    assert products.flops == 4 * 2 * 2 * 3 * 5


def test_products_are_repeated_with_their_own_memory_layout() -> None:
    with ProductCounter() as products:
        torch.randn(6, 4).t() @ torch.randn(6, 8)
    (product,) = products.counts
    left, right = product.factors()
    assert (left.shape, left.stride()) == ((4, 6), (1, 4))
    assert (right.shape, right.stride()) == ((6, 8), (8, 1))
    assert seconds_alone(products.counts, perf_counter)[product] > 0
