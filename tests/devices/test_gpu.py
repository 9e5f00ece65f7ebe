"""Tests on a GPU: compiled calls in CUDA graphs, half precision, batches, memory."""

import gc
from functools import partial

import pytest
import torch

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cache import release_caches
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import CompiledBody
from drafttrain.decoding.engine.probe import reference_logits
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.types import Proposal, Source
from tests.decoding.decoded import decoder_of, sources_for, tokens_of
from tests.decoding.engine.fresh import extend, sources_of
from tests.decoding.engine.test_compiling import compiled
from tests.tiny_drafters import shared, tiny_drafter
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
FAMILIES = ["llama", "marian", "t5", "whisper"]
TREE = torch.tensor([-1, -1, 0, 0])
SINGLE = 1e-5
"""Tolerance of families with float32 norms, which compilation computes in another order."""


def on_gpu(family: str, dtype: torch.dtype = torch.float64, **changes: object) -> CachedModel:
    return CachedModel(tiny_model(family, **changes).to(DEVICE, dtype))


def decoded(
    target: CachedModel, drafter: Drafter, sources: list[Source], batch_size: int
) -> list[list[int]]:
    own = partial(sequence_randomness, 0, device=target.device)
    decoder = decoder_of(target, drafter, 4, randomness=own)
    return tokens_of(decoder.decode_all(sources, 12, batch_size))


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference relative to the largest logit."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_rounds_equal_fresh_forwards_at_every_position_without_recompiling(family):
    """Trees at other positions in every round, with one CUDA graph per shape."""
    target = on_gpu(family)
    body, source = compiled(target), sources_of(target.model)[0]
    state, path = target.encode(source), source.prefix
    draft = torch.tensor([8, 9, 30, 11], device=DEVICE)
    seen = []
    for turn in range(6):
        [score] = target.score([(state, path, Proposal(draft, TREE))])
        for node, nodes in enumerate(([], [0], [1], [0, 2], [0, 3])):
            whole = torch.cat([path, draft[nodes]])
            expected = reference_logits(target.model, source, whole)[-1]
            assert worst(score.logits[node], expected) < SINGLE
        target.keep(state, torch.tensor([0]))
        path = torch.cat([path, draft[:1], draft.new_tensor([12 + turn])])
        seen.append(body.graphs.compilations)
    assert seen[1] >= 1 and seen[-1] == seen[2] and not body.graphs.failed


@pytest.mark.parametrize("family", ["marian", "t5"])
def test_a_spec_drafter_decodes_the_same_tokens_compiled(family):
    target = CachedModel(shared(family).to(DEVICE))
    drafter = BlockDrafter(tiny_drafter(family).to(DEVICE))
    sources = sources_for(target.model)
    expected = [decoded(target, each, sources, 1) for each in (NoDrafter(), drafter)]
    assert expected[0] == expected[1]
    for engine in (target.engine, drafter.engine):
        engine.compiled = CompiledBody(engine.body)
    assert [decoded(target, each, sources, 1) for each in (NoDrafter(), drafter)] == expected
    for engine in (target.engine, drafter.engine):
        assert engine.compiled.graphs.compilations > 0 and not engine.compiled.graphs.failed


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_decode_the_tokens_of_single_sequences(family):
    """Also compiled, when the cache grows after its first graphs were made."""
    target = on_gpu(family)
    sources = sources_for(target.model)
    alone = decoded(target, MaxGramDrafter(), sources, 1)
    assert decoded(target, MaxGramDrafter(), sources, 4) == alone
    body = compiled(target)
    for size in (1, 4, 1):
        assert decoded(target, MaxGramDrafter(), sources, size) == alone
    assert body.graphs.compilations > 0 and not body.graphs.failed


def test_outputs_stay_when_another_call_follows():
    """CUDA graphs reuse their output memory."""
    target = on_gpu("llama")
    compiled(target)
    source = sources_of(target.model)[0]
    state, found = target.encode(source), []
    path = torch.cat([source.prefix, torch.arange(6, 14, device=DEVICE)])
    extend(target, state, source.prefix)
    for end in range(len(source.prefix) + 1, len(path) + 1):
        found.append(extend(target, state, path[:end]))
    expected = reference_logits(target.model, source, path)[len(source.prefix) :]
    assert worst(torch.cat([one.logits for one in found]), expected) < SINGLE


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float64_as_the_models_own_forward(family, how):
    exact, target = on_gpu(family), on_gpu(family, torch.bfloat16)
    if how == "compiled":
        compiled(target)
    source = sources_of(exact.model)[1]
    draft = torch.tensor([8, 9, 30, 11], device=DEVICE)
    state, path = target.encode(source), source.prefix
    for _ in range(3):
        [score] = target.score([(state, path, Proposal.chain(draft))])
        whole = torch.cat([path, draft])
        expected = reference_logits(exact.model, source, whole)[-5:]
        own = worst(reference_logits(target.model, source, whole)[-5:], expected)
        assert worst(score.logits, expected) < 2 * own + 0.01
        target.keep(state, torch.tensor([0, 1]))
        path = torch.cat([path, draft[:2], draft[3:]])


def test_memory_is_returned():
    """The cache is freed when no sequence uses it, the model when nothing references it."""

    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    allocated()  # libraries allocate their own memory with the first model
    on_gpu("llama")
    before = allocated()
    target = on_gpu("llama", max_position_embeddings=4096)
    with_model = allocated()
    state = target.encode(sources_of(target.model)[0])
    extend(target, state, torch.full((4000,), 7, device=DEVICE))
    layers, heads, width, size = target.model.config.num_hidden_layers, 2, 4, 8
    assert allocated() - with_model >= layers * 2 * heads * 4000 * width * size
    del state
    release_caches()
    assert allocated() <= with_model + 1024
    del target
    assert allocated() <= before + 1024
