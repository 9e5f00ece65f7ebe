"""Compiled calls say what others say; what cannot be compiled runs as it is, and a line says why.

But for one test they are traced as when they are compiled and then run operation by operation,
which takes no C++ compiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from drafttrain.config.commands import EvalConfig, GenerateConfig
from drafttrain.decoding.engine import compiled, compiling
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiled import CompiledEncoder, CompiledStep
from drafttrain.decoding.engine.compiling import compile_calls
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Proposal, Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from tests.comparing import close
from tests.decoding.decoded import generate, sources_for, tokens_of
from tests.decoding.test_batch_parity import ANY, NEW, SLOTS, TREES
from tests.tiny_drafters import shared, told_states
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _apart() -> Iterator[None]:
    """Nothing is left of engines and compiled code of other tests."""
    compiling.ENLISTED.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of one sequence, whether what was traced has run."""
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(compiling, "missing_compiler", lambda: None)
    return count_calls(monkeypatch)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls, run = [], CompiledStep.__call__

    def count(step, *given):
        found = run(step, *given)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(CompiledStep, "__call__", count)
    return calls


def decode(target: CachedModel, drafter: Drafter) -> list[list[int]]:
    return tokens_of(play(target, drafter))


def play(target: CachedModel, drafter: Drafter) -> list[Output]:
    decoder = Decoder(
        target,
        drafter,
        FixedLength(4),
        GreedyMatch(),
        Sampling(),
        lambda number: sequence_randomness(4, number),
    )
    return decoder.decode_all(sources_for(target.model, 8), NEW)


def decode_compiled(model: PreTrainedModel, name: str) -> list[list[int]]:
    target, drafter = CachedModel(model), (ANY | SLOTS | TREES)[name](model)
    compile_calls("on")
    return decode(target, drafter)


@pytest.mark.parametrize(
    ("family", "name", "layers"),
    [
        ("marian", "soft copy", {"decoder_layers": 1}),
        ("t5", "plain", {"num_decoder_layers": 1}),
        ("llama", "opt-tree", {"num_hidden_layers": 1}),
    ],
)
def test_compiled_calls_decode_as_others_do(family, name, layers, traced, capsys):
    model = shared(family) if name in SLOTS else tiny_model(family, **layers)
    assert decode_compiled(model, name) == generate(model, sources_for(model, 8), NEW)
    assert traced.count(True) > 3 * traced.count(False)  # those of a source of one token
    assert all(traced) is (family == "llama")  # which prompts have none of
    first, *said = capsys.readouterr().err.splitlines()
    assert f"to compile: {len(said)}; each takes" in first
    assert said and all(": compiled; " in line for line in said)


@pytest.mark.parametrize(
    "settings",
    [
        {"previous_token_rank": 3, "encoder": "target", "output_tokens": 20},
        {"slot_attention": "causal", "feeds_first": True, "slot_weights": "own"},
    ],
    ids=["previous tokens", "first fed"],
)
def test_blocks_are_drafted_by_compiled_calls_as_by_others(settings, traced):
    """Whatever is drafted, outputs are the target's: so the drafts themselves are compared."""
    model, drafts = shared("marian"), []
    for how in ("off", "on"):
        target, drafter = CachedModel(model), told_states(model, decoder_layers=1, **settings)
        compile_calls(how)
        played = play(target, drafter)
        drafts.append([round.drafted for output in played for round in output.rounds])
    assert drafts[0] == drafts[1]
    assert traced.count(True) > 3 * traced.count(False)  # those of a source of one token


def test_blocks_are_no_calls_of_one_row(traced):
    drafter = SLOTS["soft copy"](shared("marian"))
    compile_calls("on")
    assert [*drafter.engine.compiled._kinds] == ["calls of few rows"]


def test_machine_code_decodes_as_others_do(monkeypatch, capsys):
    reason = compiling.missing_compiler()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.delitem(compiled.ROWS, "calls of one row")  # each kind takes ten seconds
    calls, model = count_calls(monkeypatch), tiny_model("llama", num_hidden_layers=1)
    assert decode_compiled(model, "max-gram") == generate(model, sources_for(model, 8), NEW)
    assert any(calls) and ": compiled; " in capsys.readouterr().err


def test_layers_that_a_drafter_reads_are_kept(traced):
    model = tiny_model("bart", decoder_layers=1)
    [source] = sources_for(model, 1)
    tokens = torch.cat([source.prefix, torch.tensor([7, 9, 8])])
    kept = []
    for how in ("off", "on"):
        target = CachedModel(model)
        compile_calls(how)
        state = target.encode(source)
        for length in (3, 4):
            given = ([state], [tokens[:length]], [Proposal.empty()], (0, -1))
            outputs = target.score(*given)
        kept += outputs
    assert traced == [True, True]
    for layer in (0, -1):
        torch.testing.assert_close(kept[1].layer(layer), kept[0].layer(layer))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_texts_are_read_as_they_are_uncompiled(family, traced, monkeypatch, capsys):
    """One text of some tokens is; one of a single token, and several at once, are read as ever."""
    monkeypatch.delitem(compiled.ROWS, "calls of few rows")
    monkeypatch.delitem(compiled.ROWS, "calls of one row")
    model, found, run = tiny_model(family), [], CompiledEncoder.__call__

    def count(encoder, ids):
        states = run(encoder, ids)
        found.append(states is not None)
        return states

    monkeypatch.setattr(CompiledEncoder, "__call__", count)
    target, sources = CachedModel(model), sources_for(model, 4)
    alone = [make_source([7], model), *sources]
    before = [target.encode(source).encoded for source in alone]
    compile_calls("on")
    assert "encoder of 2 layers, width 16: compiled" in capsys.readouterr().err
    for source, expected in zip(alone, before, strict=True):
        close(target.encode(source).encoded, expected, 1e-10)
    assert found == [False, True, True, True, True]
    for state, expected in zip(target.encode_all(sources), before[1:], strict=True):
        close(state.encoded, expected, 1e-10)
    assert len(found) == 5


def test_decoders_of_one_shape_keep_their_own_weights(traced, monkeypatch):
    monkeypatch.delitem(compiled.ROWS, "calls of few rows")
    models = [tiny_model("llama", num_hidden_layers=1) for _ in range(2)]
    for parameter in models[1].parameters():
        parameter.data.mul_(-1.5)
    targets = [CachedModel(model) for model in models]
    compile_calls("on")
    for model, target in zip(models, targets, strict=True):
        found = decode(target, ANY["plain"](model))
        assert found == generate(model, sources_for(model, 8), NEW)


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_auto_keeps_what_is_faster(share, traced, monkeypatch, capsys):
    monkeypatch.setattr(compiled, "time_share", lambda quick, slow, now=None: share)
    model = tiny_model("llama", num_hidden_layers=1)
    target = CachedModel(model)
    compile_calls("auto")
    assert decode(target, ANY["plain"](model)) == generate(model, sources_for(model, 8), NEW)
    assert any(traced) == (share < 1)
    what = "compiled" if share < 1 else "left as they are"
    assert f"calls of one row {what} ({share:.2f} of the time)" in capsys.readouterr().err


def test_a_share_is_that_of_the_medians():
    now = [0.0]

    def taking(seconds: float):
        def call() -> None:
            now[0] += seconds

        return call

    share = compiling.time_share(taking(2.0), taking(8.0), lambda: now[0])
    assert share == pytest.approx(0.25)


def test_what_cannot_be_compiled_runs_as_it_is_and_one_line_says_why(traced, monkeypatch, capsys):
    def fail(*given):
        raise RuntimeError("no room\nfor machine code")

    monkeypatch.setattr(compiling, "compile_module", lambda module, stack: fail)
    model = tiny_model("llama")
    target = CachedModel(model)
    compile_calls("on")
    assert decode(target, ANY["plain"](model)) == generate(model, sources_for(model, 8), NEW)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "compile: decoder of 2 layers, width 16, runs uncompiled: no room"


def test_calls_that_fail_later_run_as_they_are_from_then_on(traced, monkeypatch, capsys):
    model = tiny_model("gpt2", n_layer=1)
    target = CachedModel(model)
    compile_calls("on")
    capsys.readouterr()
    for calls in target.engine.compiled._kinds.values():
        calls.which = "never compiled"
    assert decode(target, ANY["max-gram"](model)) == generate(model, sources_for(model, 8), NEW)
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 2 and all("run uncompiled from here on: " in line for line in lines)
    assert not any(traced)


def test_without_a_compiler_one_line_says_so(capsys):
    model = tiny_model("llama")
    target, drafter = CachedModel(model), ANY["causal"](model)
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        compile_calls("auto")
    assert decode(target, drafter) == generate(model, sources_for(model, 8), NEW)
    [line] = capsys.readouterr().err.splitlines()
    assert "no-such-compiler" in line and line.endswith("all calls run uncompiled")


def test_batches_run_uncompiled_and_one_line_says_so(traced, capsys):
    target = CachedModel(tiny_model("llama"))
    compile_calls("on", most=8)
    assert target.engine.compiled is None
    assert "(batch_size 8) are not compiled" in capsys.readouterr().err


def test_families_that_are_not_known_run_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr("drafttrain.decoding.engine.cached_model.KNOWN", ())
    model = tiny_model("llama")
    target = CachedModel(model)
    compile_calls("on")
    assert decode(target, ANY["plain"](model)) == generate(model, sources_for(model, 8), NEW)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("compile: a 'llama' model runs uncompiled: ")


@pytest.mark.parametrize("settings", [EvalConfig, GenerateConfig])
def test_the_setting_takes_three_values(settings):
    assert settings().compile == "off"
    assert settings(compile=True).compile == "on"  # what YAML reads `on` as
    with pytest.raises(ValidationError, match="'off', 'auto' or 'on'"):
        settings(compile="always")
