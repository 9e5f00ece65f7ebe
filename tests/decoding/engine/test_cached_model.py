"""Cached scoring equals an uncached pass, whatever was drafted and rejected before."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.types import Proposal
from tests.comparing import close
from tests.decoding.engine.fresh import PATHS, close_caches, extend, fresh, last_hidden
from tests.tiny_families import any_family
from tests.tiny_models import CAUSAL_FAMILIES, tiny_model, tiny_source

SOURCE = [5, 9, 17, 30, 8, 21]
DRAFTS = [[8, 30, 21], [4], [10, 11, 12, 13], [], [33], [6, 6], [8]]


@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, "bart", "t5", "whisper"])
def test_catching_up_equals_a_fresh_prefill_wherever_the_cache_diverges(family):
    model = tiny_model(family)
    cached, source = CachedModel(model), tiny_source(PATHS[0], model)
    state = cached.encode(source)
    for path, draft in zip(PATHS, DRAFTS, strict=True):
        score = extend(cached, state, torch.tensor(path))
        reference = fresh(model, source, path)
        close(score.logits[-1], reference.logits[0, -1])
        close(score.hidden[-1], last_hidden(reference)[-1])
        close_caches(state, reference.past_key_values)
        for token in draft:  # one per call, as drafters do
            path = [*path, token]
            [score] = cached.forward_batch([ForwardRequest(state, [token], 1)])
            reference = fresh(model, source, path)
            close(score.logits, reference.logits[0, -1:])
            close(score.hidden, last_hidden(reference)[-1:])
        close_caches(state, reference.past_key_values)


def test_only_tokens_missing_from_the_cache_are_computed():
    model = tiny_model("llama")
    cached, source = CachedModel(model), tiny_source([5, 9, 17], model)
    state, computed = cached.encode(source), []
    model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: computed.append(inputs[0].shape[1])
    )
    for path in ([5, 9, 17], [5, 9, 17, 8, 9], [5, 9, 17, 8, 9], [5, 9, 17, 8, 11, 12], [5, 9]):
        extend(cached, state, torch.tensor(path))
    cached.forward_batch([ForwardRequest(state, [3, 4], 2)])
    assert computed == [3, 2, 1, 2, 1, 2]
    assert state.tokens == [5, 9, 3, 4]


@pytest.mark.parametrize("family", [*CAUSAL_FAMILIES, "GPTJ"])
def test_rows_that_nothing_needs_are_not_projected_to_the_vocabulary(family):
    model, projected = any_family(family), []
    cached, source = CachedModel(model), tiny_source(list(range(4, 34)), model)
    model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, output: projected.append(output.shape[:-1].numel())
    )
    state = cached.encode(source)
    path = torch.cat([source.prefix, torch.tensor([5, 6])])
    cached.score([(state, path, Proposal.chain(torch.tensor([7, 8])))])
    extend(cached, state, torch.cat([path, torch.tensor([7, 9, 10])]))
    assert projected == [3, 1]


def test_encoding_a_prompt_runs_no_model():
    model = tiny_model("gpt2")
    target = CachedModel(model)
    model.transformer.register_forward_hook(lambda *_: pytest.fail("encode ran the model"))
    state = target.encode(tiny_source(SOURCE, model))
    assert (state.cached, state.tokens) == (0, [])


def test_positions_count_the_prompt_of_a_decoder_only_model():
    for family in CAUSAL_FAMILIES:
        model = tiny_model(family)
        cached = CachedModel(model)
        assert cached.position_limit == cached.source_limit == 64
        source = tiny_source([5] * 60, model)
        assert cached.max_new_tokens(source, 1000) == 5  # the fifth needs no position
        state = cached.encode(source)
        extend(cached, state, torch.tensor([5] * 64))
        with pytest.raises(ValueError, match="65 tokens are more than the 64 positions"):
            cached.forward_batch([ForwardRequest(state, [5], 1)])
        with pytest.raises(ValueError, match="65 tokens but the model takes 64"):
            cached.encode(tiny_source([5] * 65, model))


def test_half_precision_models_give_logits_in_float32():
    model = tiny_model("llama").to(torch.bfloat16)
    cached, source = CachedModel(model), tiny_source(SOURCE, model)
    score = extend(cached, cached.encode(source), source.prefix)
    assert (score.logits.dtype, score.hidden.dtype) == (torch.float32, torch.bfloat16)


def test_encoder_and_cross_attention_run_once_a_sequence():
    model, runs = tiny_model("bart"), []
    target, source = CachedModel(model), tiny_source(SOURCE, model)
    model.get_encoder().register_forward_hook(lambda *_: runs.append("encoder"))
    attention = model.get_decoder().layers[0].encoder_attn
    attention.k_proj.register_forward_hook(lambda *_: runs.append("cross"))
    state = target.encode(source)
    tokens = source.prefix.tolist()
    for _ in range(4):
        target.score([(state, torch.tensor(tokens), Proposal.chain(torch.tensor([6, 7])))])
        target.keep(state, torch.arange(1))
        tokens += [6, 11]
    assert runs == ["encoder", "cross"]


def test_positions_run_out_one_token_after_the_decoder_is_full():
    model = tiny_model("marian")
    target = CachedModel(model)
    source = tiny_source(SOURCE, model)
    assert target.max_new_tokens(source, 1000) == 64  # 1 + 63 positions; the 64th token needs none
    assert target.max_new_tokens(source, 10) == 10
    assert CachedModel(tiny_model("t5")).max_new_tokens(source, 1000) == 1000


def test_sources_that_do_not_fit_are_refused():
    model = tiny_model("bart")
    target = CachedModel(model)
    with pytest.raises(ValueError, match="65 tokens but the model takes 64"):
        target.encode(tiny_source([5] * 65, model))
    with pytest.raises(ValueError, match="no tokens"):
        target.encode(tiny_source([], model))


def test_decoders_start_from_the_prompt_or_the_start_token_alone():
    source = tiny_source(SOURCE, tiny_model("llama"))
    assert source.prefix.tolist() == source.input_ids.tolist() == SOURCE
    model = tiny_model("bart")
    assert tiny_source(SOURCE, model).prefix.tolist() == [1]
    model.generation_config.decoder_start_token_id = None
    assert tiny_source(SOURCE, model).prefix.tolist() == [3]
    model.generation_config.decoder_start_token_id = [1, 2]
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        tiny_source(SOURCE, model)


class NormalisedHead(nn.Module):
    """An output projection that is no linear layer, as remote code brings along."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, F.normalize(self.weight))


def test_an_output_projection_with_a_weight_alone_is_decoded():
    model = tiny_model("llama")
    model.lm_head = NormalisedHead(model.lm_head)
    target, source = CachedModel(model), tiny_source([5, 6, 7], model)
    size = len(model.lm_head.weight)
    assert (target.row_size, target.vocabulary) == (size, size) and target.supports_tree_attention
    [output] = target.score([(target.encode(source), source.prefix, Proposal.empty())])
    expected = model(source.prefix[None]).logits[:, -1]
    close(output.logits, expected, 1e-9)
