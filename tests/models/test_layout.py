"""Column-major weights compute the same, and leave embeddings alone."""

from __future__ import annotations

import copy

import pytest
import torch

from drafttrain.models.layout import count_parameters, store_column_major
from tests.comparing import same_weights
from tests.tiny_models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_outputs_stay_the_same(family: str) -> None:
    model = tiny_model(family, tie_word_embeddings=True).float()
    model.lm_head.weight = model.get_input_embeddings().weight  # tied
    before = copy.deepcopy(model)
    inputs = {"input_ids": torch.tensor([[5, 6, 1]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    with torch.no_grad():
        expected = model(**inputs).logits
        store_column_major(model)
        assert torch.allclose(model(**inputs).logits, expected, atol=1e-5)
    assert same_weights(before, model)
    assert model.get_input_embeddings().weight.is_contiguous()
    assert model.lm_head.weight.t().is_contiguous()


def test_other_types_are_left_as_they_are() -> None:
    layer = torch.nn.Linear(3, 4).double()
    store_column_major(layer)
    assert layer.weight.is_contiguous()


def test_a_tied_output_matrix_counts_once_however_it_lies_in_memory():
    model = tiny_model("llama").float()
    model.lm_head.weight = model.get_input_embeddings().weight  # tied
    before = sum(parameter.numel() for parameter in model.parameters())
    store_column_major(model)
    assert sum(parameter.numel() for parameter in model.parameters()) > before
    assert count_parameters(model) == before
