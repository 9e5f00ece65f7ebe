"""Products by packed weights are those of the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from drafttrain.decoding.engine import products
from drafttrain.decoding.engine.products import LARGE, Linear, crossover
from tests.comparing import close

SIZES = (320, 256)
ONEDNN = torch.backends.mkldnn.is_available()
assert SIZES[0] * SIZES[1] >= LARGE


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_weights_give_the_plain_product(rows: int, biased: bool, monkeypatch) -> None:
    monkeypatch.setattr(products, "rows_of_plain", lambda *_: 2)  # as on some processors
    torch.manual_seed(0)
    weight, x = torch.randn(SIZES), torch.randn(2, rows, SIZES[1])
    bias = torch.randn(SIZES[0]) if biased else None
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    for stored in (weight, weight.t().contiguous().t()):
        layer = Linear(stored, bias)
        with torch.inference_mode():
            found = layer(x[:1] if rows == 1 else x)
        close(found.double(), expected[: len(found)], 1e-4)
        assert (layer.packed is not None) == (ONEDNN and rows > 1)


@pytest.mark.parametrize("few", [2, 8])
def test_as_many_rows_as_the_processor_says_are_multiplied_plainly(few, monkeypatch) -> None:
    monkeypatch.setattr(products, "rows_of_plain", lambda *_: few)
    ways, plain = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *given: ways.append("plain") or plain(*given))
    torch.manual_seed(0)
    layer = Linear(torch.randn(SIZES))
    with torch.inference_mode():
        for rows in (2, 3, 8, 9):
            x = torch.randn(1, rows, SIZES[1])
            ways.append(rows)
            close(layer(x).double(), (x.double() @ layer.weight.double().t()), 1e-4)
            assert (layer.packed is not None) == (ONEDNN and rows > few)  # no copy before its time
    packed = {2: [2, "plain", 3, 8, 9], 8: [2, "plain", 3, "plain", 8, "plain", 9]}
    if ONEDNN:
        assert ways == packed[few]


def test_the_plain_product_is_taken_up_to_where_it_is_slower() -> None:
    rows, plain = (4, 8, 16), [1.0, 2.0, 3.0]
    assert crossover(rows, plain, [0.9, 3.0, 4.0], 2) == 2
    assert crossover(rows, plain, [1.1, 2.0, 4.0], 2) == 4
    assert crossover(rows, plain, [1.1, 2.1, 3.1], 2) == 16
    assert crossover((), [], [], 0) == 0


@pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN to time")
def test_a_size_is_timed_once() -> None:
    products.rows_of_plain.cache_clear()
    for _ in range(2):
        found = products.rows_of_plain(SIZES, (SIZES[1], 1), torch.float32, 1)
        assert found in (2, 4, 8, 16)
    assert products.rows_of_plain.cache_info().misses == 1
    assert products.rows_of_plain(SIZES, (SIZES[1], 1), torch.bfloat16, 1) == 0


@pytest.mark.parametrize("rows", [1, 6])
def test_packed_weights_of_bfloat16_give_the_plain_product(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = (torch.randn(size).bfloat16() for size in (SIZES, (rows, SIZES[1])))
    layer = Linear(weight)
    with torch.inference_mode():
        found = layer(x)
    exact = x.double() @ weight.double().t()
    assert found.dtype == torch.bfloat16
    close(found.double(), exact, 0.01 * float(exact.abs().max()))
    supported = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (layer.packed is not None) == supported


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_code_may_make_products(dtype: torch.dtype) -> None:
    """Compiled calls make theirs while they are traced, which asks the processor for nothing."""

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = Linear(weight)
        product.packs = False  # as in calls left to the compiler
        return product(x)

    torch.manual_seed(0)
    x, weight = torch.randn(1, 1, SIZES[1]).to(dtype), torch.randn(SIZES).to(dtype)
    traced = torch.compile(multiply, backend="eager", fullgraph=True)
    with torch.inference_mode():
        close(traced(x, weight).double(), (x @ weight.t()).double(), 0.5)


def test_small_and_precise_weights_stay_as_they_are() -> None:
    for layer in (Linear(torch.randn(8, 4)), Linear(torch.randn(SIZES, dtype=torch.float64))):
        layer(torch.randn(5, layer.weight.shape[1], dtype=layer.weight.dtype))
        assert layer.packed is None


def test_products_of_the_same_input_lie_side_by_side() -> None:
    parts = [Linear(torch.randn(n, 4), torch.randn(n)) for n in (3, 5)]
    x = torch.randn(2, 4)
    joined = Linear.side_by_side(parts)
    assert joined.width == 8
    close(joined(x), torch.cat([part(x) for part in parts], -1), 1e-6)
