"""Cached scoring equals the model run afresh, whatever was drafted and dropped before."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    LEDConfig,
    LEDForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
)

from drafttrain.decoding.cached_model import CachedModel, SequenceState, make_source
from drafttrain.decoding.types import Proposal, Source
from tests.tiny_models import BART_SHAPE, FAMILIES, T5_SHAPE, VOCAB, tiny_model

SOURCE = [5, 9, 17, 30, 8, 21]
KEPT = [(3, 0), (4, 4), (2, 1), (1, 1), (5, 3), (0, 0), (3, 3)]
"""(drafted, accepted) of successive rounds."""


def fresh(model: PreTrainedModel, source: Source, tokens: list[int]):
    """The whole path through the model's own forward, without a cache from before."""
    with torch.inference_mode():
        return model(
            input_ids=source.input_ids[None],
            decoder_input_ids=torch.tensor([tokens]),
            use_cache=True,
            output_hidden_states=True,
        )


def any_model(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if family == "m2m100":
        start = {"decoder_start_token_id": 1}
        model = M2M100ForConditionalGeneration(M2M100Config(**(BART_SHAPE | start)))
    elif family == "mt5":
        model = MT5ForConditionalGeneration(MT5Config(**T5_SHAPE))
    else:
        return tiny_model(family)
    return model.double().eval()


@pytest.mark.parametrize("family", [*FAMILIES, "mt5", "m2m100"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_and_caches_equal_a_fresh_prefill_after_every_round(family, attention):
    model = any_model(family)
    model.set_attn_implementation(attention)
    target, source = CachedModel(model), make_source(SOURCE, model)
    state = target.encode(source)
    generator = torch.Generator().manual_seed(1)
    tokens = source.prefix.tolist()
    for drafted, accepted in KEPT:
        draft = torch.randint(4, VOCAB, (drafted,), generator=generator)
        [score] = target.score([state], [torch.tensor(tokens)], [Proposal.chain(draft)])
        reference = fresh(model, source, tokens + draft.tolist())
        rows = slice(len(tokens) - 1, None)
        close(score.logits, reference.logits[0, rows])
        close(score.hidden, reference.decoder_hidden_states[-1][0, rows])
        target.keep(state, torch.arange(accepted))
        tokens += draft[:accepted].tolist()
        close_caches(state, fresh(model, source, tokens).past_key_values)
        tokens.append(int(torch.randint(4, VOCAB, (), generator=generator)))


def close(seen: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(seen, expected, rtol=1e-10, atol=1e-10)


def close_caches(state: SequenceState, expected) -> None:
    for part in ("self_attention_cache", "cross_attention_cache"):
        layers = zip(getattr(state.cache, part).layers, getattr(expected, part).layers, strict=True)
        for layer, reference in layers:
            close(layer.keys, reference.keys)
            close(layer.values, reference.values)


def test_keep_gathers_any_path():
    model = tiny_model("marian")
    target, source = CachedModel(model), make_source(SOURCE, model)
    state = target.encode(source)
    draft = Proposal.chain(torch.tensor([7, 8, 9, 10]))
    target.score([state], [source.prefix], [draft])
    before = state.cache.self_attention_cache.layers[1].keys.clone()
    target.keep(state, torch.tensor([1, 3]))
    after = state.cache.self_attention_cache.layers[1].keys
    assert torch.equal(after, before[:, :, [0, 2, 4]])
    assert state.cached == 3


def test_encoder_and_cross_attention_run_once_a_sequence():
    model = tiny_model("bart")
    runs = {"encoder": 0, "cross": 0}
    model.get_encoder().register_forward_hook(lambda *_: count(runs, "encoder"))
    layer = model.get_decoder().layers[0].encoder_attn
    layer.k_proj.register_forward_hook(lambda *_: count(runs, "cross"))
    target, source = CachedModel(model), make_source(SOURCE, model)
    state = target.encode(source)
    tokens = source.prefix.tolist()
    for _ in range(4):
        target.score([state], [torch.tensor(tokens)], [Proposal.chain(torch.tensor([6, 7]))])
        target.keep(state, torch.arange(1))
        tokens += [6, 11]
    assert runs == {"encoder": 1, "cross": 1}


def count(runs: dict[str, int], name: str) -> None:
    runs[name] += 1


def test_sequences_do_not_share_state():
    model = tiny_model("t5")
    target = CachedModel(model)
    sources = [make_source(SOURCE, model), make_source(SOURCE[:3], model)]
    states = [target.encode(source) for source in sources]
    drafts = [Proposal.chain(torch.tensor([6, 7])), Proposal.chain(torch.tensor([8]))]
    scores = target.score(states, [s.prefix for s in sources], drafts)
    for source, draft, score in zip(sources, drafts, scores, strict=True):
        path = source.prefix.tolist() + draft.tokens.tolist()
        close(score.logits, fresh(model, source, path).logits[0])


def test_the_families_called_directly_agree_with_the_models_own_forward():
    """Biases of the output head and scales in front of it are what a direct call can forget."""
    for family in FAMILIES:
        model = tiny_model(family)
        source = make_source(SOURCE, model)
        target = CachedModel(model)
        state = target.encode(source)
        [score] = target.score([state], [source.prefix], [Proposal.chain(torch.tensor([5, 6]))])
        with torch.inference_mode():
            expected = model(
                encoder_outputs=state.encoder_outputs,
                decoder_input_ids=torch.tensor([[*source.prefix.tolist(), 5, 6]]),
            ).logits[0]
        close(score.logits, expected)


def test_positions_run_out_one_token_after_the_decoder_is_full():
    model = tiny_model("marian")
    target = CachedModel(model)
    source = make_source(SOURCE, model)
    assert target.max_new_tokens(source, 1000) == 64  # 1 + 63 are fed, the 64th is not
    assert target.max_new_tokens(source, 10) == 10
    assert CachedModel(tiny_model("t5")).max_new_tokens(source, 1000) == 1000


def test_sources_that_do_not_fit_are_refused():
    model = tiny_model("bart")
    target = CachedModel(model)
    with pytest.raises(ValueError, match="65 tokens but the model takes 64"):
        target.encode(make_source([5] * 65, model))
    with pytest.raises(ValueError, match="no tokens"):
        target.encode(make_source([], model))


def test_trees_are_refused_until_they_are_supported():
    model = tiny_model("bart")
    target, source = CachedModel(model), make_source(SOURCE, model)
    tree = Proposal(tokens=torch.tensor([5, 6]), parents=torch.tensor([-1, -1]))
    with pytest.raises(ValueError, match="tree"):
        target.score([target.encode(source)], [source.prefix], [tree])


def test_models_without_a_plain_cache_are_refused():
    led = LEDForConditionalGeneration(
        LEDConfig(
            vocab_size=VOCAB,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            max_encoder_position_embeddings=32,
            max_decoder_position_embeddings=32,
            attention_window=4,
        )
    ).eval()
    with pytest.raises(ValueError, match="'led' model .* attention_window"):
        CachedModel(led)


def test_models_that_answer_otherwise_with_a_cache_are_found_out():
    """FSMT feeds only its last token when it has a cache: it would judge drafts by wrong rows."""
    shape = BART_SHAPE | {"decoder_start_token_id": 1, "langs": ["a", "b"]}
    shape |= {"src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB}
    torch.manual_seed(0)
    model = FSMTForConditionalGeneration(FSMTConfig(**shape)).eval()
    with pytest.raises(ValueError, match="'fsmt' model .* other logits than without"):
        CachedModel(model)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="model.eval"):
        CachedModel(tiny_model("marian").train())


def test_the_decoder_starts_from_its_start_token_alone():
    model = tiny_model("bart")
    assert make_source(SOURCE, model).prefix.tolist() == [1]
    model.generation_config.decoder_start_token_id = None
    assert make_source(SOURCE, model).prefix.tolist() == [3]
    model.generation_config.decoder_start_token_id = [1, 2]
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        make_source(SOURCE, model)
