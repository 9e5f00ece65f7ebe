"""Replayed rounds are those of decoding: equal in greedy decoding, of one law in sampling."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import (
    Bandit,
    Cumulative,
    Entropy,
    FixedLength,
    HeadPolicy,
    Logistic,
)
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, make_verifier
from drafttrain.evaluation.stops.chain_trace import TraceOptions, check_traceable, log_trace
from drafttrain.evaluation.stops.replay import Candidate
from drafttrain.models.acceptance_head import AcceptanceHead
from tests.decoding.enumeration import enumerate_law, total_variation
from tests.evaluation.stops.replays import (
    check_counts,
    decoded_rounds,
    random_head,
    replayed_rounds,
)
from tests.tiny_models import near_copy, tiny_model

GREEDY = Sampling()
WIDE = Sampling(2.0, top_k=3)
"""Rows that overlap enough for the weights of prefixes to count."""
DEPTH = 6


def policies(head: AcceptanceHead):
    pairs = [(FixedLength(k), Candidate("fixed", k)) for k in (1, 3, 6)]
    pairs += [
        (Entropy(nats, DEPTH), Candidate("entropy", nats, max_draft=DEPTH)) for nats in (1.0, 2.5)
    ]
    pairs += [
        (Cumulative(0.1, DEPTH), Candidate("cumulative", 0.1, max_draft=DEPTH)),
        (Logistic(0.8, DEPTH), Candidate("logistic", 0.8, max_draft=DEPTH)),
        (Bandit(0.2, DEPTH), Candidate("bandit", 0.2, max_draft=DEPTH)),
    ]
    for h in (0.2, 0.5, 0.8):
        pairs.append((HeadPolicy(head, h, DEPTH), Candidate("head", h, "D", DEPTH)))
    return pairs


@pytest.mark.parametrize("state_kind", ["token", "drawn"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("max_new_tokens", [7, 30])
def test_greedy_replay_equals_decoding_round_for_round(family, max_new_tokens, state_kind):
    target_model = tiny_model(family)
    drafter_model = near_copy(target_model, 0.05, seed=2)
    target, drafter = CachedModel(target_model), CachedModel(drafter_model)
    head = random_head(16, state=state_kind)
    randomness = SampledRandomness(torch.Generator().manual_seed(0))
    rejections = 0
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(4, 40, (5,), generator=generator).tolist()
        source = make_source(ids, target_model)
        plain = Decoder(
            target, NoDrafter(), FixedLength(1), GreedyMatch(), GREEDY, lambda _: randomness
        )
        text = plain.decode_all([source], max_new_tokens)[0].tokens
        options = TraceOptions(GREEDY, max_new_tokens, DEPTH, state_kind=state_kind)
        trace = log_trace(target, drafter, source, text, options, randomness)
        for stop, candidate in policies(head):
            decoder = Decoder(
                target, CausalDrafter(drafter), stop, GreedyMatch(), GREEDY, lambda _: randomness
            )
            output = decoder.decode_all([source], max_new_tokens)[0]
            assert output.tokens == text
            found = replayed_rounds(trace, candidate, head)
            assert found == decoded_rounds(output), (seed, candidate.name)
            check_counts(trace, candidate, head, output, drafter.eos_ids)
            rejections += sum(drafted > accepted for _, drafted, accepted in found)
    assert rejections > 5, "too few rejections to show anything"


@pytest.mark.parametrize(
    ("sampling", "kind", "depth"),
    [
        (Sampling(1.0, top_k=2), "fixed", 3),
        (Sampling(1.0, top_k=2), "head", 3),
        (Sampling(3.0, top_p=0.7), "head", 2),
        (Sampling(1.0, top_k=2), "drawn", 3),
        (Sampling(1.0, top_k=2), "logistic", 3),
    ],
)
def test_replayed_rounds_have_the_law_of_decoding(sampling, kind, depth):
    law, replayed = laws(sampling, kind, depth)
    assert total_variation(law, replayed) < 1e-9


@pytest.mark.parametrize(
    ("sampling", "kind", "depth"),
    [
        (WIDE, "fixed", 2),
        (WIDE, "head", 2),
        (WIDE, "drawn", 2),
        (WIDE, "logistic", 2),
        (Sampling(3.0, top_p=0.7), "fixed", 2),
    ],
)
def test_replayed_rounds_of_block_verification_have_its_law(sampling, kind, depth):
    law, replayed = laws(sampling, kind, depth, "block", "block")
    assert total_variation(law, replayed) < 1e-9


def test_rounds_of_one_rule_are_not_those_of_the_other():
    law, replayed = laws(WIDE, "fixed", 2, "block", "rejection")
    assert total_variation(law, replayed) > 1e-3


def laws(sampling, kind, depth, rule="rejection", replayed_as="rejection"):
    """Outputs and rounds together, every outcome of every random choice summed: of decoding under a
    rule, and of traces replayed as those of one."""
    target_model = tiny_model("llama", vocab_size=4, num_hidden_layers=1)
    drafter_model = tiny_model("llama", seed=9, vocab_size=4, num_hidden_layers=1)
    target, drafter = CachedModel(target_model), CachedModel(drafter_model)
    state_kind = "drawn" if kind == "drawn" else "token"
    head = random_head(16, seed=3 if state_kind == "drawn" else 2, state=state_kind)
    source, max_new_tokens = make_source([2, 3], target_model), depth + 1
    stop, candidate = {
        "fixed": (FixedLength(depth), Candidate("fixed", depth)),
        "logistic": (Logistic(0.6, depth), Candidate("logistic", 0.6, max_draft=depth)),
    }.get(kind, (HeadPolicy(head, 0.5, depth), Candidate("head", 0.5, "D", depth)))

    def decode(randomness):
        decoder = Decoder(
            target,
            CausalDrafter(drafter),
            stop,
            make_verifier(rule),
            sampling,
            lambda _: randomness,
        )
        output = decoder.decode_all([source], max_new_tokens)[0]
        return tuple(output.tokens), tuple(decoded_rounds(output))

    def replay_one(randomness):
        plain = Decoder(
            target, NoDrafter(), FixedLength(1), RejectionSampling(), sampling, lambda _: randomness
        )
        text = plain.decode_all([source], max_new_tokens)[0].tokens
        options = TraceOptions(sampling, max_new_tokens, depth, 1, state_kind, replayed_as)
        trace = log_trace(target, drafter, source, text, options, randomness)
        return tuple(text), tuple(replayed_rounds(trace, candidate, head))

    law, replayed = enumerate_law(decode), enumerate_law(replay_one)
    drafted = defaultdict(float)
    for (_, rounds), probability in law.items():
        drafted[rounds[0][1:]] += probability
    assert len(drafted) > 2, "the pair is too simple to show anything"
    assert abs(sum(replayed.values()) - 1.0) < 1e-9
    return law, replayed


def test_a_drafter_that_goes_on_after_the_targets_eos_is_refused():
    target_model, drafter_model = tiny_model("llama"), tiny_model("llama", seed=5)
    drafter_model.generation_config.eos_token_id = 7
    with pytest.raises(ValueError, match="ends its outputs with token 1.*eos_token_id = \\[7\\]"):
        check_traceable(CachedModel(target_model), CausalDrafter(CachedModel(drafter_model)))
