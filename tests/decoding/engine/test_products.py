"""Products by packed weights are those of the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from drafttrain.decoding.engine import products
from drafttrain.decoding.engine.products import LARGE, Linear, Ways, _timed, choose_ways, fastest
from tests.comparing import close

SIZES = (320, 256)
ONEDNN = torch.backends.mkldnn.is_available()
assert SIZES[0] * SIZES[1] >= LARGE


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("repeated", [(), (2, 3)])
def test_packed_weights_give_the_plain_product(rows, biased, repeated) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(SIZES), torch.randn(2, rows, SIZES[1])
    bias = torch.randn(SIZES[0]) if biased else None
    for stored in (weight, weight.t().contiguous().t()):
        layer = Linear(stored, bias)
        layer.ways = Ways(1, frozenset(repeated))  # as on some processors
        for given in (x[:1], x, x.transpose(0, 1)):
            with torch.inference_mode():
                found = layer(given)
            exact = given.double() @ weight.double().t() + (0 if bias is None else bias.double())
            close(found.double(), exact, 1e-4)
        assert (layer.packed is not None) == ONEDNN


@pytest.mark.parametrize("few", [2, 8])
def test_as_many_rows_as_the_processor_says_are_multiplied_plainly(few, monkeypatch) -> None:
    ways, plain, packed = [], F.linear, products.by_packed
    monkeypatch.setattr(F, "linear", lambda *given: ways.append("plain") or plain(*given))
    monkeypatch.setattr(
        products, "by_packed", lambda x, *more: ways.append(f"{len(x)} packed") or packed(x, *more)
    )
    torch.manual_seed(0)
    layer = Linear(torch.randn(SIZES))
    layer.ways = Ways(few, frozenset({3}))
    with torch.inference_mode():
        for rows in (2, 3, 8, 9):
            x = torch.randn(rows, SIZES[1])
            close(layer(x).double(), (x.double() @ layer.weight.double().t()), 1e-4)
            assert (layer.packed is not None) == (ONEDNN and rows > few)  # no copy before its time
    expected = {2: ["plain", "6 packed", "8 packed"], 8: ["plain", "plain", "plain"]}[few]
    if ONEDNN:
        assert ways == [*expected, "9 packed"]


def test_the_fastest_way_is_taken() -> None:
    none, slow = [0.9, 3.0, 4.0], [1.0, 2.0, 3.0]
    assert by_seconds(slow, none) == Ways(0)
    assert by_seconds(slow, [1.1, 2.0, 4.0]) == Ways(1)
    assert by_seconds(slow, [1.1, 2.1, 3.1]) == Ways(8)
    # one row is repeated for both reasons that there may be: packed it is slow, as it lies too
    assert by_seconds(slow, [1.1, 1.2, 1.3], [0.8, 1.3, None]) == Ways(0, frozenset({1}))
    assert by_seconds(slow, [1.1, 1.4, 1.3], [1.2, 1.3, None]) == Ways(1, frozenset({2}))
    assert by_seconds(slow, [1.1, 2.1, 3.1], [1.0, 2.1, None]) == Ways(0, frozenset({1}))


def by_seconds(plain, packed, repeated=(None,) * 3) -> Ways:
    rows = zip((1, 2, 8), plain, packed, repeated, strict=True)
    return fastest({count: [one for one in took if one is not None] for count, *took in rows})


@pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN to time")
def test_models_alike_are_timed_once(monkeypatch) -> None:
    times = []
    monkeypatch.setattr(products, "_CHOSEN", {})
    monkeypatch.setattr(products, "_timed", lambda them: times.append(them) or once(them))
    once = _timed

    def read(count: int) -> list[Linear]:
        return [Linear(torch.randn(SIZES)) for _ in range(count)]

    for model in (read(2), read(2), read(3), [Linear(torch.randn(8, 4))]):
        choose_ways(model)
        assert all((one.ways is not None) == one.packs for one in model)
        packs = {one.ways for one in model if one.packs}
        assert len(packs) <= 1  # one size: one choice
    assert [len(them) for them in times] == [2, 3, 0]


@pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN to time")
def test_many_matrices_are_not_all_timed(monkeypatch) -> None:
    monkeypatch.setattr(products, "TIMED_BYTES", 1)
    monkeypatch.setattr(products, "fastest", lambda seconds: Ways(0))
    model = [Linear(torch.randn(size)) for size in (SIZES, SIZES, SIZES[::-1], SIZES)]
    choose_ways(model)
    assert all(one.ways == Ways(0) for one in model)
    assert [one.packed is not None for one in model] == [True, False, True, False]


@pytest.mark.parametrize("rows", [1, 6])
def test_packed_weights_of_bfloat16_give_the_plain_product(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = (torch.randn(size).bfloat16() for size in (SIZES, (rows, SIZES[1])))
    layer = Linear(weight)
    if layer.packs:
        layer.ways = Ways(0, frozenset({1}))
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
