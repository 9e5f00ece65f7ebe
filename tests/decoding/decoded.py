"""Real models decoded: by generate, and by the one loop."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output, Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch
from tests.tiny_models import VOCAB, tiny_source

GREEDY = Sampling()


def sources_for(model: PreTrainedModel, count: int = 6) -> list[Source]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [
        tiny_source(torch.randint(4, VOCAB, (length,), generator=generator), model)
        for length in lengths
    ]


def generate(model: PreTrainedModel, sources: list[Source], max_new_tokens: int) -> list[list[int]]:
    return [
        heard(model, source, max_new_tokens)
        if not source.is_text
        else model.generate(
            source.input_ids[None],
            attention_mask=torch.ones_like(source.input_ids[None]),
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
        )[0, len(source.prefix) :].tolist()
        for source in sources
    ]


def heard(model: PreTrainedModel, source: Source, max_new_tokens: int) -> list[int]:
    """What a speech model's `generate` returns, which leaves prefix and EOS out: an output that is
    shorter than it might be was ended by EOS."""
    features = source.inputs["input_features"][None]
    [tokens] = model.generate(features, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens)
    ended = len(tokens) < max_new_tokens
    return tokens.tolist() + [model.generation_config.eos_token_id] * ended


def run(
    model: PreTrainedModel,
    sources: list[Source],
    drafter: Drafter,
    max_new_tokens: int = 24,
    k: int = 4,
    batch_size: int = 1,
    verifier=None,
) -> list[Output]:
    return Decoder(
        CachedModel(model),
        drafter,
        FixedLength(k),
        verifier or GreedyMatch(),
        GREEDY,
        lambda row: sequence_randomness(0, row),
    ).decode_all(sources, max_new_tokens, batch_size=batch_size)


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]
