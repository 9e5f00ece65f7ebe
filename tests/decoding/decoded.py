"""Decoding of Transformers models with `generate` and with the decoding loop."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafttrain.decoding.batching import run_single
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.roles import Drafter, Randomness, StopPolicy, Verifier
from drafttrain.decoding.sampling import SampledRandomness, sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.trees.verifiers import MultiRound, RecursiveRejection, TargetWalk
from drafttrain.decoding.types import Output, Proposal, Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling
from tests.tiny_models import VOCAB, tiny_source

GREEDY = Sampling()
SEEDED = partial(sequence_randomness, 0)
TREE_RULES = {
    "deterministic": TargetWalk,
    "without_replacement": RecursiveRejection,
    "independent": MultiRound,
    "iid": MultiRound,
}


def drawn(seed: int = 0) -> SampledRandomness:
    """Returns the random source used in production."""
    return SampledRandomness(torch.Generator().manual_seed(seed))


def sources_for(model: PreTrainedModel, count: int = 4) -> list[Source]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [
        tiny_source(torch.randint(4, VOCAB, (length,), generator=generator), model)
        for length in lengths
    ]


def generate(model: PreTrainedModel, sources: list[Source], max_new_tokens: int) -> list[list[int]]:
    return [
        audio(model, source, max_new_tokens)
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


def audio(model: PreTrainedModel, source: Source, max_new_tokens: int) -> list[int]:
    """Returns the output of a speech model's `generate`, which omits prefix and EOS; an output
    shorter than the limit ended with EOS, which is added."""
    features = source.inputs["input_features"][None]
    [tokens] = model.generate(features, do_sample=False, num_beams=1, max_new_tokens=max_new_tokens)
    ended = len(tokens) < max_new_tokens
    return tokens.tolist() + [model.generation_config.eos_token_id] * ended


def decoder_of(
    target: Any,
    drafter: Drafter,
    stop: StopPolicy | int = 4,
    verifier: Verifier | None = None,
    sampling: Sampling = GREEDY,
    randomness: Callable[[int], Randomness] = SEEDED,
) -> Decoder:
    """Returns a decoder. target: a Transformers model or an object with the methods of
    `CachedModel`. stop: a policy or a fixed length. verifier: None selects greedy match or a
    lossless rule by the sampling and the drafter."""
    target = CachedModel(target) if isinstance(target, PreTrainedModel) else target
    stop = FixedLength(stop) if isinstance(stop, int) else stop
    if verifier is None:
        verifier = GreedyMatch() if sampling.greedy else RejectionSampling()
        if drafter.drafts_trees and not sampling.greedy:
            verifier = TREE_RULES[drafter.draw_kind(sampling)]
    return Decoder(target, drafter, stop, verifier, sampling, randomness)


def run(
    model: PreTrainedModel,
    sources: list[Source],
    drafter: Drafter,
    max_new_tokens: int = 24,
    k: int = 4,
    batch_size: int = 1,
    verifier=None,
) -> list[Output]:
    decoder = decoder_of(model, drafter, k, verifier)
    return decoder.decode_all(sources, max_new_tokens, batch_size=batch_size)


def propose(
    drafter: Drafter,
    source: Source,
    tokens: Tensor | None = None,
    stop: StopPolicy | int = 4,
    sampling: Sampling = GREEDY,
) -> Proposal:
    """Returns the draft of a new session after these committed tokens; None: after the prefix."""
    session = drafter.open(source, sampling, drawn())
    stop = FixedLength(stop) if isinstance(stop, int) else stop
    return run_single(session.propose(source.prefix if tokens is None else tokens, None, stop))


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [output.tokens for output in outputs]
