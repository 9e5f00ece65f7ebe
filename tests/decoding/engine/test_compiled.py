"""Compiled calls say what others say; what cannot be compiled runs as it is, and says why.

Traced by torch.compile as when it compiles, then run operation by operation: no compiler is needed.
"""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.engine import compiled
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiled import CompiledStep, compile_calls
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Proposal, Sampling
from tests.decoding.decoded import generate, sources_for
from tests.decoding.test_batch_parity import ANY, NEW, SLOTS, TREES, decode
from tests.tiny_drafters import shared
from tests.tiny_models import tiny_model

GREEDY = Sampling()


@pytest.fixture
def compiling(monkeypatch):
    """Calls of decoders that are read from here on are compiled; a list of them, true where so."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    calls, run = [], CompiledStep.__call__

    def count(step, *given):
        found = run(step, *given)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(CompiledStep, "__call__", count)
    torch._dynamo.reset()
    compile_calls("on")
    yield calls
    compile_calls("off")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "name"),
    [("marian", "soft copy"), ("t5", "causal"), ("llama", "opt-tree")],
)
def test_compiled_calls_decode_as_others_do(family, name, compiling):
    model = shared(family) if name in SLOTS else tiny_model(family)
    expected = generate(model, sources_for(model, 8), NEW)
    drafter = (ANY | SLOTS | TREES)[name](model)
    assert decode(model, drafter, FixedLength(4), GREEDY, 1) == expected
    assert compiling and all(compiling)


def test_layers_that_a_drafter_reads_are_kept(compiling):
    model = tiny_model("bart")
    [source] = sources_for(model, 1)
    kept = {}
    for how in ("on", "off"):
        compile_calls(how)
        target = CachedModel(model)
        state = target.encode(source)
        tokens = torch.cat([source.prefix, torch.tensor([7, 9])])
        [kept[how]] = target.score([state], [tokens], [Proposal.empty()], layers=(0, -1))
    assert compiling == [True]
    for layer in (0, -1):
        torch.testing.assert_close(kept["on"].layer(layer), kept["off"].layer(layer))


def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(compiling, monkeypatch):
    def fail(*given, **settings):
        raise RuntimeError("no C++ compiler\nwas found")

    monkeypatch.setattr(compiled, "_compile", lambda module: fail)
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="run uncompiled, as torch says: no C") as caught:
        found = decode(model, ANY["plain"](model), FixedLength(4), GREEDY, 1)
    assert found == generate(model, sources_for(model, 8), NEW)
    assert len(caught) == 1 and not any(compiling)


def test_auto_compiles_small_decoders_in_float32_alone(compiling, monkeypatch):
    compile_calls("auto")
    monkeypatch.setattr(compiled.shutil, "which", lambda name: "/usr/bin/g++")
    assert CachedModel(tiny_model("gpt2")).engine._compiled is None  # float64
    single = tiny_model("gpt2").float()
    assert CachedModel(single).engine._compiled is not None
    monkeypatch.setattr(compiled, "SMALL", 100)
    assert CachedModel(single).engine._compiled is None
