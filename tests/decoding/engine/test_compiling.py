"""Compiled calls have the same logits; each shape is compiled once while weights stay the same.

Graphs are traced as for compilation and then run operation by operation, which needs no C++
compiler.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.engine import compiling
from drafttrain.decoding.engine.cache import release_caches
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import SOURCES, CompiledBody
from drafttrain.decoding.engine.engine import ENGINES, compile_calls, reserve
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Proposal, Source
from tests.comparing import close
from tests.decoding.decoded import decoder_of, sources_for, tokens_of
from tests.decoding.engine.fresh import check_rounds, extend, fresh, sources_of
from tests.tiny_drafters import shared, tiny_drafter
from tests.tiny_families import any_family
from tests.tiny_models import tiny_model

FAMILIES = ["llama", "marian", "t5", "whisper"]
SHALLOW = {
    "llama": {"num_hidden_layers": 1, "max_position_embeddings": 600},
    "t5": {"num_layers": 1},
    **dict.fromkeys(("marian", "whisper"), {"encoder_layers": 1, "decoder_layers": 1}),
}
"""Settings of models of one layer, which are traced sooner."""


@pytest.fixture(autouse=True)
def traced(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    ENGINES.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(target: CachedModel) -> CompiledBody:
    body = target.engine.compiled = CompiledBody(target.engine.body)
    return body


def shallow(family: str, **settings: object) -> CachedModel:
    return CachedModel(tiny_model(family, **SHALLOW[family]), **settings)


def checked(target: CachedModel, state: SequenceState, source: Source, *tokens: int) -> None:
    """Extends a sequence and compares its last row with an uncached pass."""
    path = torch.cat([source.prefix, source.prefix.new_tensor(tokens)])
    score = extend(target, state, path)
    close(score.logits[-1], fresh(target.model, source, path.tolist()).logits[0, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_a_batch_equal_fresh_passes_and_compile_a_shape_once(family):
    """Chains of several lengths and a tree, with batch rows and tokens padded to buckets."""
    target = CachedModel(tiny_model(family))
    body = compiled(target)
    check_rounds(target, sources_of(target.model)[:3])
    assert body.graphs.compilations <= 2  # of 4 and of 8 tokens


@pytest.mark.parametrize(
    ("family", "settings"),
    [("marian", {"slots": "paper"}), ("t5", {"previous_token_rank": 3})],
    ids=str,
)
def test_spec_drafters_draft_the_same_tokens_compiled(family, settings):
    target = CachedModel(shared(family))
    drafter = BlockDrafter(tiny_drafter(family, **settings))
    sources = sources_for(target.model)[:3]
    decoder = decoder_of(target, drafter, 4)
    expected = tokens_of(decoder.decode_all(sources, 12))
    compile_calls("on")
    assert tokens_of(decoder.decode_all(sources, 12)) == expected
    for engine in (drafter.cached.engine, target.engine):
        for graphs in (engine.compiled.graphs, engine.encode.graphs):
            assert graphs.compilations > 0 and not graphs.failed


def test_weights_adapters_and_hooks_that_change_are_compiled_again():
    target = shallow("llama")
    body, model, source = compiled(target), target.model, make_source([5, 9, 17], target.model)

    def logits_after(token: int) -> None:
        checked(target, target.encode(source), source, token)

    logits_after(8)
    logits_after(9)
    assert body.graphs.compilations == 1
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)  # like a training step
    logits_after(10)
    assert body.graphs.compilations == 2
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1.0)  # another tensor
    logits_after(11)
    assert body.graphs.compilations == 3
    mlp = model.model.layers[0].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Linear(*[model.config.hidden_size] * 2))
    mlp.down_proj.double()  # an adapter
    logits_after(12)
    assert body.graphs.compilations == 4
    mlp._disable_adapters, mlp.scaling = False, {"default": 1.0}  # attributes of peft's layers
    mlp.forward = lambda x: (
        mlp.scaling["default"] * mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    )
    logits_after(17)
    mlp.scaling["default"] = 0.5
    logits_after(18)
    assert body.graphs.compilations == 6
    hook = mlp.register_forward_hook(lambda module, inputs, output: 2.0 * output)
    logits_after(13)
    hook.remove()
    logits_after(14)
    assert body.graphs.compilations == 8


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_weights_are_constants_of_a_graph_and_caches_are_not(family, monkeypatch):
    inputs = []

    def recording(graph, arguments, **settings):
        inputs.append(arguments)
        return graph.forward

    monkeypatch.setattr(compiling, "BACKEND", recording)
    target = shallow(family)
    body, source = compiled(target), sources_of(target.model)[0]
    for token in (8, 9):
        state = target.encode(source)
        checked(target, state, source, token)
        checked(target, state, source, token, 7)
        del state
        release_caches()  # the next call allocates other tensors
    assert body.graphs.compilations == len(inputs) > 0
    assert not any(isinstance(one, nn.Parameter) for arguments in inputs for one in arguments)


@pytest.mark.parametrize("family", ["marian", "t5", "whisper"])
def test_first_calls_fill_the_rows_of_newcomers_with_one_graph_for_all_lengths(family):
    target = shallow(family)
    body, sources = compiled(target), sources_of(target.model, (3, 9, SOURCES))
    states = []
    for source in sources[:2]:
        states.append(target.encode(source))
        checked(target, states[-1], source, 8)
    assert body.graphs.compilations == 2  # of one and two rows
    for state, source in zip(states, sources[:2], strict=True):
        checked(target, state, source, 8, 9)
    graphs = body.graphs.compilations
    states.clear()
    del state
    checked(target, target.encode(sources[2]), sources[2], 8)
    assert body.graphs.compilations == graphs


@pytest.mark.parametrize("reserved", [0, 130])
def test_columns_are_compiled_once_more_if_they_double_and_once_if_they_are_reserved(reserved):
    target = shallow("llama")
    body, source = compiled(target), make_source([5, 9, 17], target.model)
    if reserved:
        reserve(reserved)
    state, path = target.encode(source), torch.arange(140) % 30 + 4
    path[:3] = source.prefix
    extend(target, state, path[:100])
    for end in range(101, 132):
        score = extend(target, state, path[:end])
        if end in (102, 127, 128, 131):
            expected = fresh(target.model, source, path[:end].tolist()).logits[0, -1]
            close(score.logits[-1], expected)
    assert body.graphs.compilations == (1 if reserved else 2)


@pytest.mark.parametrize("family", ["Gemma3Text", "m2m100", "GptOss"])
def test_windows_and_positions_inside_the_decoder_are_compiled_too(family):
    model = any_family(family)
    target, source = CachedModel(model), make_source(torch.tensor([5, 9, 17, 30]), model)
    plain = CachedModel(model)
    body, states = compiled(target), (target.encode(source), plain.encode(source))
    tree = Proposal(torch.tensor([8, 9, 8, 30]), torch.tensor([-1, -1, 0, 1]))
    for turn in range(3):
        path = torch.cat([source.prefix, torch.arange(6, 6 + 3 * turn)])
        found, expected = (
            one.score([(state, path, tree)])[0]
            for one, state in zip((target, plain), states, strict=True)
        )
        close(found.logits, expected.logits, 1e-4)
        for one, state in zip((target, plain), states, strict=True):
            one.keep(state, torch.arange(0))
    assert body.graphs.compilations >= 1 and not body.graphs.failed


def test_models_that_do_not_compile_run_eagerly_with_one_line(capsys):
    target = shallow("llama")
    layer = target.model.model.layers[0]
    layer.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    body, source = compiled(target), make_source([5, 9, 17], target.model)
    state = target.encode(source)
    checked(target, state, source)
    checked(target, state, source, 8)
    assert "calls run uncompiled from here on" in capsys.readouterr().err
    assert body.graphs.compilations == 0


def test_auto_leaves_a_cpu_uncompiled():
    target = shallow("llama")
    for how in ("auto", "off"):
        compile_calls(how)
        assert target.engine.compiled is None


def test_a_drafter_of_few_tokens_is_compiled_and_follows_its_weights():
    drafter = shallow("llama", draftable=torch.tensor([1, 6, 9, 22]))
    model, source = drafter.model, make_source([5, 9, 17], drafter.model)
    body, state = compiled(drafter), drafter.encode(source)
    for token in (8, 9):
        path = [5, 9, 17, token]
        extend(drafter, state, source.prefix)
        found = extend(drafter, state, torch.tensor(path)).logits[-1]
        expected = fresh(model, source, path).logits[0, -1]
        close(found[[1, 6, 9, 22]], expected[[1, 6, 9, 22]])
        assert found.argmax() in (1, 6, 9, 22)
        with torch.no_grad():
            model.lm_head.weight.mul_(-2.0)
    assert body.graphs.compilations > 0 and not body.graphs.failed
