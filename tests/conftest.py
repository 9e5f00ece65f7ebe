"""Fixtures shared by all tests: one thread, and tiny random models (see tiny_models.py)."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import tiny_model

torch.set_num_threads(1)


@pytest.fixture
def tiny_marian() -> PreTrainedModel:
    """A random Marian model, float64, 40 tokens, pad = decoder start = 0, EOS 1."""
    return tiny_model("marian")


@pytest.fixture
def tiny_bart() -> PreTrainedModel:
    """A random BART model, float64, 40 tokens, decoder start = EOS = 1."""
    return tiny_model("bart")


@pytest.fixture
def tiny_t5() -> PreTrainedModel:
    """A random T5 model, float64, 40 tokens, pad = decoder start = 0, EOS 1."""
    return tiny_model("t5")
