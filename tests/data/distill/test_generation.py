"""Batched generation: padding and finished rows change nothing."""

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.data.distill.generation import Draws, generate_batch, needs_equal_lengths, trim
from drafttrain.decoding.padding import padded
from drafttrain.decoding.types import Sampling
from tests.tiny_models import CAUSAL_FAMILIES, EOS, FAMILIES, tiny_model

PROMPTS = [[4 + (i * 13 + j * 7) % 36 for j in range(1 + i % 5)] for i in range(8)]
NEW = 12
GREEDY = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW, "max_length": None}
SAMPLING = Sampling(temperature=0.8, top_k=7, top_p=0.95, min_p=0.05)
ENDS = [1, 15, 21, 25]


def generate(model: PreTrainedModel, prompt: list[int], **settings) -> list[int]:
    """Returns Transformers' output for one prompt, without padding."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, **settings)[0, len(prompt) :].tolist()


def ending_model(family: str, pad: int | None = 0, **changes) -> PreTrainedModel:
    model = tiny_model(family, **changes)
    model.generation_config.update(eos_token_id=ENDS, pad_token_id=pad)
    return model


OTHERS = {
    "mistral": {"sliding_window": 3},  # windows are allowed in a batch
    # GPT-2 and many chat models pad with EOS, or name no padding token at all
    "gpt2": {"pad": ENDS[0], "pad_token_id": None},
    "opt": {"pad": None},
}


@pytest.mark.parametrize(
    ("family", "changes"), [*((family, {}) for family in CAUSAL_FAMILIES), *OTHERS.items()], ids=str
)
def test_a_row_of_a_batch_is_the_row_alone_and_is_generate(family, changes):
    model = ending_model(family, **changes)
    batch = generate_batch(model, PROMPTS, GREEDY)
    assert generate_batch(model, PROMPTS[:1], GREEDY) == batch[:1]
    assert batch == [generate(model, prompt, **GREEDY) for prompt in PROMPTS]
    assert len({len(tokens) for tokens in batch}) > 2  # rows ended at different steps


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_sampled_row_depends_only_on_its_random_numbers(family):
    model = ending_model(family)
    uniforms = torch.rand(len(PROMPTS), NEW, dtype=torch.double, generator=torch.manual_seed(5))
    batch = generate_batch(model, PROMPTS, GREEDY, Draws(SAMPLING, uniforms))
    for i, prompt in enumerate(PROMPTS):
        alone = Draws(SAMPLING, uniforms[i : i + 1])
        assert generate_batch(model, [prompt], GREEDY, alone) == [batch[i]]
    assert len({len(tokens) for tokens in batch}) > 2


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_beams_of_a_batch_are_those_of_generate(family):
    model = ending_model(family)
    beam = GREEDY | {"num_beams": 3}
    alone = [generate(model, prompt, **beam) for prompt in PROMPTS[:4]]
    assert generate_batch(model, PROMPTS[:4], beam) == alone


@pytest.mark.parametrize("depth", [1, 3])
def test_t5_decodes_with_any_decoder_depth(depth):
    """`generate` alone makes a cache as deep as the encoder and fails if the decoder is deeper."""
    model = tiny_model("t5", num_decoder_layers=depth)
    for beams in (1, 3):
        batch = generate_batch(model, PROMPTS[:4], GREEDY | {"num_beams": beams})
        assert len({tuple(tokens) for tokens in batch}) > 2
        uncached = GREEDY | {"num_beams": beams, "use_cache": False}
        for prompt, tokens in zip(PROMPTS[:4], batch, strict=True):
            ids = torch.tensor([prompt])
            expected = model.generate(ids, attention_mask=torch.ones_like(ids), **uncached)
            assert tokens == expected[0, 1:].tolist()


SEEING_PADDING = ({"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2})
SEEING_PADDING += ({"min_length": 6}, {"bad_words_ids": [[37], [19]]})
OF_ENCODER_DECODERS = ({}, {"eos_token_id": EOS}, {"encoder_no_repeat_ngram_size": 1})
OF_ENCODER_DECODERS += ({"forced_bos_token_id": 7, "forced_eos_token_id": EOS},)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_encoder_decoders_that_end_early_change_nothing(family):
    """For every family and many settings of generation_config, outputs equal those of generate."""
    sources = [[*prompt, EOS] for prompt in PROMPTS]
    ids, mask = padded([torch.tensor(source) for source in sources], 0)
    short, lengths = GREEDY | {"max_new_tokens": 8}, set()
    for settings in (*SEEING_PADDING, *OF_ENCODER_DECODERS):
        model = tiny_model(family)
        model.generation_config.update(**{"eos_token_id": ENDS} | settings)
        outputs = trim(model.generate(ids, attention_mask=mask, **short), model)
        assert generate_batch(model, sources, short) == outputs
        lengths |= {len(tokens) for tokens in outputs}
    assert len(lengths) > 2  # rows ended at different steps


@pytest.mark.parametrize("setting", SEEING_PADDING, ids=str)
def test_settings_that_would_see_the_padding_ask_for_rows_of_one_length(setting):
    model = ending_model("llama")
    assert not needs_equal_lengths(model)
    model.generation_config.update(**setting)
    assert needs_equal_lengths(model)
    alike = [prompt for prompt in PROMPTS if len(prompt) == 3]
    alone = [generate(model, prompt, **GREEDY) for prompt in alike]
    assert generate_batch(model, alike, GREEDY) == alone
    encoder_decoder = tiny_model("t5")
    encoder_decoder.generation_config.update(**setting)
    assert not needs_equal_lengths(encoder_decoder)  # its padding is on the other side
