"""Compiled layers compute the same, with graphs that are used for batches of all lengths."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from drafttrain.data.batches.examples import Batch, Example
from drafttrain.training import compiling
from drafttrain.training.compiling import compile_layers
from tests.comparing import close
from tests.training.objectives.test_objective import OBJECTIVES
from tests.training.tiny_runs import SIX_STEPS, logged, small_task, train_small


@pytest.fixture
def compiler(monkeypatch) -> CompileCounter:
    """A compiler that counts graphs and runs them operation by operation."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(compiling, "COMPILER", {"backend": counter})
    return counter


def batch_of(collate: Callable[[list[Example]], Batch], seed: int) -> Batch:
    """Returns a batch of 3 to 6 rows of 1 to 12 tokens."""
    random = np.random.default_rng(seed)

    def tokens() -> list[int]:
        return random.integers(4, 30, random.integers(1, 12)).tolist()

    return collate([Example(0, row, tokens(), [*tokens(), 1]) for row in range(3 + seed % 4)])


@pytest.mark.parametrize("name", ["pairs", "follow_states"])
def test_batches_of_other_lengths_need_no_other_graph(name, compiler):
    (plain, collate), (compiled, _) = (OBJECTIVES[name]() for _ in range(2))
    compile_layers(compiled.model)
    counts = []
    for seed in range(4):
        losses = []
        for objective in (plain, compiled):
            torch.manual_seed(seed)  # dropout
            losses.append(objective.train()(batch_of(collate, seed), 0.0).loss)
            losses[-1].backward()
        close(*losses, 1e-5)
        counts.append(compiler.frame_count)
    assert 0 < counts[2] == counts[-1]


def test_a_compiled_run_has_the_losses_of_one_that_is_not(compiler, tmp_path):
    """With dropout, equal in both passes of glancing, and with cached prefix keys."""
    for name, on in (("plain", False), ("compiled", True)):
        settings = SIX_STEPS.model_copy(update={"compile": on, "max_steps": 2})
        train_small(small_task(dropout=0.2, decoder_layers=1), settings, tmp_path / name)
    found, expected = (torch.tensor(logged(tmp_path / x, "loss")) for x in ("compiled", "plain"))
    close(found, expected, 1e-5)
    assert 0 < compiler.frame_count <= compiling.GRAPHS
