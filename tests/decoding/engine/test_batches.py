"""Sequences in shared calls: each has the results that it has alone."""

import pytest
import torch

from drafttrain.decoding.engine.cache import cached_tensors
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.probe import reference_logits
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.types import Source
from tests.comparing import close
from tests.decoding.engine.fresh import (
    check_rounds,
    close_caches,
    extend,
    extend_all,
    fresh,
    precision_of,
    sources_of,
)
from tests.tiny_families import ATTENTIONS, FURTHER, any_family
from tests.tiny_models import BOS, VOCAB, tiny_model, tiny_seq2seq, tiny_source


@pytest.mark.covered
@pytest.mark.parametrize(
    ("family", "attention"), [*ATTENTIONS, *((family, None) for family in FURTHER)]
)
def test_rounds_of_a_batch_equal_fresh_passes_of_each_sequence(family, attention):
    model = any_family(family)
    if attention is not None:
        model.set_attn_implementation(attention)
    target = CachedModel(model)
    assert target.supports_tree_attention == (family != "Bloom")
    check_rounds(target, sources_of(model))


@pytest.mark.parametrize("family", ["llama", "marian", "t5", "whisper"])
def test_rounds_of_a_batch_equal_fresh_passes_in_single_precision(family):
    model = tiny_model(family).float()
    check_rounds(CachedModel(model), sources_of(model))


@pytest.mark.parametrize("family", ["llama", "bart", "t5"])
def test_sequences_leave_and_enter_and_some_sit_out(family):
    """Released batch rows are reused; calls of rows that are not adjacent work on copies."""
    model = tiny_model(family)
    target, sources = CachedModel(model), sources_of(model)
    states = target.encode_all(sources)
    paths = [[*source.prefix.tolist(), 21, 6, 30] for source in sources]

    def check(*numbers: int) -> None:
        for number in numbers:
            paths[number].append(7 + number)
        pairs = [(states[number], torch.tensor(paths[number])) for number in numbers]
        for number, score in zip(numbers, extend_all(target, pairs), strict=True):
            reference = fresh(model, sources[number], paths[number])
            close(score.logits[-1], reference.logits[0, -1])
            close_caches(states[number], reference.past_key_values)

    check(0, 1, 2, 3)
    check(3, 0, 2)  # not adjacent, in another order
    check(1, 3)
    states[1] = None
    cache = target.engine.cache
    assert cache.in_use == 3  # unreferenced rows are released
    check(2, 3, 0)
    states[1] = target.encode(sources[1])
    assert states[1].row == 1
    check(0, 1, 2, 3)
    states[0] = None
    assert cache.in_use == 3
    check(1, 2)
    check(3)


def test_a_row_that_is_given_up_during_a_call_is_left_alone_until_the_next():
    """Garbage collection can release a row at any time; no rows may move during a call."""
    model = tiny_model("llama")
    target = CachedModel(model)
    sources = [tiny_source([5, 9, 17 + i], model) for i in range(3)]
    states = target.encode_all(sources)
    extend_all(target, [(states[i], sources[i].prefix) for i in range(3)])

    def give_up(*_: object) -> None:
        states[0] = None

    model.model.layers[0].register_forward_hook(give_up)
    pairs = [(states[i], torch.tensor([5, 9, 17 + i, 30])) for i in (1, 2)]
    for _ in range(2):
        found = extend_all(target, pairs)
        for i, output in zip((1, 2), found, strict=True):
            reference = fresh(model, sources[i], [5, 9, 17 + i, 30])
            close(output.logits[-1], reference.logits[0, -1])
            close_caches(states[i], reference.past_key_values)
    assert target.engine.cache.in_use == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_room_is_made_once_and_kept(attention):
    """Calls have more tokens than the mask buffer has rows, and more columns than it had."""
    model = tiny_model("llama", max_position_embeddings=600)
    model.set_attn_implementation(attention)
    target, source = CachedModel(model), tiny_source([5, 9, 17], model)
    path = torch.randint(4, VOCAB, (400,), generator=torch.Generator().manual_seed(0))
    states = target.encode_all([source, source])
    extend(target, states[0], path[:100])
    layer = target.engine.cache.self_attention.layers[0]
    assert layer.keys.shape[::2] == (2, 128)
    score = extend_all(target, [(states[0], path[:300]), (states[1], path)])
    assert layer.keys.shape[::2] == (2, 400)
    for i, length in enumerate((300, 400)):
        reference = fresh(model, source, path[:length].tolist())
        close(score[i].logits[-1], reference.logits[0, -1], precision_of(model))
        close_caches(states[i], reference.past_key_values, precision_of(model))


@pytest.mark.parametrize("family", ["gpt2", "bart", "llama"])
def test_padding_next_to_the_last_position_can_be_anywhere(family):
    """A sequence that uses the last of 64 positions shares a call with one that has more tokens."""
    model = tiny_model(family)
    target, sources = CachedModel(model), sources_of(model)[:2]
    path = torch.randint(4, VOCAB, (64,), generator=torch.Generator().manual_seed(5))
    states = target.encode_all(sources)
    for lengths in ((62, 4), (64, 14)):
        paths = [path[:length] for length in lengths]
        scores = extend_all(target, list(zip(states, paths, strict=True)))
        for source, own, score in zip(sources, paths, scores, strict=True):
            close(score.logits[-1], fresh(model, source, own.tolist()).logits[0, -1])


def test_nan_logits_affect_only_their_sequence():
    """NaN must not reach a later sequence in its batch row, though masked columns are read if
    another sequence is longer."""
    model = tiny_model("qwen2")
    target, source = CachedModel(model), tiny_source([5, 9, 17], model)
    states = target.encode_all([source, source])
    extend_all(target, [(state, torch.tensor([5, 9, 17, 30, 31])) for state in states])
    with torch.inference_mode():
        for held in cached_tensors(target.engine.cache.self_attention):
            held.fill_(torch.nan)
    del states
    states = target.encode_all([source, source])
    for paths in ([[5, 9], [5, 9, 17, 30]], [[5, 9, 21], [5, 9, 17, 30, 21]]):
        scores = extend_all(target, [(states[i], torch.tensor(paths[i])) for i in range(2)])
        for path, score in zip(paths, scores, strict=True):
            close(score.logits[-1], fresh(model, source, path).logits[0, -1])


def test_prompts_are_not_padded_to_the_longest_of_a_batch():
    target = CachedModel(tiny_model("llama"))
    states, sizes = target.encode_all([tiny_source([5], target.model)] * 5), (40, 3, 30, 16, 1)
    requests = [ForwardRequest(states[i], [5] * size, 1) for i, size in enumerate(sizes)]
    assert list(target.engine._groups(requests)) == [[0, 2], [1, 3, 4]]


def test_unmaskable_sources_of_different_lengths_share_no_call():
    """Whisper's cross-attention has no mask, so padding of a shorter source would be read."""
    model = tiny_model("whisper")
    target = CachedModel(model)
    generator = torch.Generator().manual_seed(7)
    encoded = [
        torch.randn(length, model.config.hidden_size, dtype=model.dtype, generator=generator)
        for length in (4, 7)
    ]
    prefix = torch.tensor([1, 5, 6])
    sources = [Source({}, prefix, encoded=own) for own in encoded]
    states = target.encode_all(sources)
    for tokens in (prefix, torch.tensor([1, 5, 6, 9])):
        found = extend_all(target, [(state, tokens) for state in states])
        for own, output in zip(encoded, found, strict=True):
            with torch.inference_mode():
                given = {"encoder_outputs": (own[None],), "decoder_input_ids": tokens[None]}
                close(output.logits[-1], model(**given).logits[0, -1])


def test_a_nan_source_affects_only_its_sequence():
    """NaN must not reach a later sequence in its batch row, though masked states are read if
    another source is longer."""
    model = tiny_model("bart")
    target, prefix = CachedModel(model), torch.tensor([1, 5])

    def source(length: int, value: float | None = None) -> Source:
        own = torch.linspace(-1, 1, length * model.config.d_model, dtype=model.dtype)
        own = own.view(length, -1) if value is None else torch.full((length, 16), value).to(own)
        return Source({"input_ids": torch.ones(length).long()}, prefix, encoded=own)

    states = target.encode_all([source(7, torch.nan), source(7)])
    extend_all(target, [(state, prefix) for state in states])
    del states
    states = target.encode_all([source(4), source(7)])
    for tokens in (prefix, torch.tensor([1, 5, 9])):
        found = extend_all(target, [(state, tokens) for state in states])
        assert all(output.logits.isfinite().all() for output in found)


def test_single_tokens_of_unequal_sequences_attend_to_their_text_only():
    """LED ignores the mask of a single token, which should hide the longer sequence's columns."""
    model = tiny_seq2seq("led")
    target, source = CachedModel(model), tiny_source([5, 9, 20, 7], model)
    paths = [torch.tensor([BOS, *own]) for own in ([8, 11, 4, 17], [30, 6])]
    states = target.encode_all([source, source])
    extend_all(target, [(state, path[:-1]) for state, path in zip(states, paths, strict=True)])
    outputs = extend_all(target, [*zip(states, paths, strict=True)])
    for path, output in zip(paths, outputs, strict=True):
        close(output.logits[0], reference_logits(model, source, path)[-1])
