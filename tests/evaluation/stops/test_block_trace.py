"""Replayed blocks are those of decoding: equal in greedy decoding, of one law in sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from drafttrain.build.drafters import make_drafter
from drafttrain.decoding.drafters import candidates
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.slots import SlotDrafter, lengths_differ
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
from drafttrain.decoding.types import Sampling, Source
from drafttrain.decoding.verifiers import GreedyMatch, RejectionSampling, make_verifier
from drafttrain.evaluation.stops.block_trace import log_block_trace
from drafttrain.evaluation.stops.chain_trace import TraceOptions, decode_text
from drafttrain.evaluation.stops.replay import Candidate, replay
from tests.decoding.drafters.toy_blocks import CONVENTIONS, toy_drafter
from tests.decoding.enumeration import enumerate_law, total_variation
from tests.decoding.toys import ToyTarget, toy_prompt, toy_source
from tests.evaluation.stops.replays import (
    check_counts,
    decoded_rounds,
    random_head,
    replayed_rounds,
)
from tests.tiny_drafters import (
    MASK,
    behind_states,
    noisy,
    parallel,
    shared,
    tiny_drafter,
    told_states,
)
from tests.tiny_models import VOCAB, tiny_model, tiny_source

GREEDY = Sampling()


MASKS = {"masks": True}
"""A drafter through masks instead of a Spec-Drafter."""
STATES = {"behind": "blocks"}
LINKED_STATES = {"behind": "linked"}
"""Drafters behind the target's states."""
SHARED = {"target's encoder": {"encoder": "target"}, "whisper": {"encoder": "target"}}
TOLD_STATES = {
    "states told": {"previous_token_rank": 3},
    "states and first fed": {
        "encoder": "target",
        "slot_attention": "causal",
        "feeds_first": True,
        "slot_weights": "own",
    },
}
"""Spec-Drafters that are fed the target's states."""


@pytest.mark.parametrize(
    "convention",
    [
        "anchored, coupled",
        "causal slots",
        "first fed",
        "first fed, coupled",
        "paper",
        "paper, bidirectional",
        *SHARED,
        *TOLD_STATES,
    ],
)
def test_greedy_replay_equals_decoding_round_for_round(convention, monkeypatch):
    monkeypatch.setattr(candidates, "CANDIDATES", VOCAB)  # coupled slots look at every token
    family = "whisper" if convention == "whisper" else "marian"
    target = CachedModel(shared(family))
    target.model.generation_config.min_new_tokens = 10
    shape = {"decoder_layers": 2} | (CONVENTIONS | SHARED | TOLD_STATES)[convention]
    sources = [tiny_source(ids, target.model) for ids in ([5, 9, 20, 7, 1], [8, 30, 1])]
    if convention in TOLD_STATES:
        check_greedy_replay(target, told_states(target.model, family, **shape), sources)
        return
    drafter = tiny_drafter(family, **shape)
    torch.manual_seed(0)
    for parameter in drafter.parameters():
        if parameter.requires_grad:  # cross-attention may be the target's
            parameter.data += 0.02 * torch.randn_like(parameter)
    check_greedy_replay(target, BlockDrafter(drafter), sources)


def test_greedy_replay_of_masks_equals_decoding_up_to_the_last_position():
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    copy = noisy(model, "llama", 0.05)
    copy.config.pard_token, copy.config.k = MASK, 4
    copy.config.max_position_embeddings = 15  # the longer prompt's last blocks have fewer slots
    drafter = make_drafter(copy)
    sources = [make_source(ids, model) for ids in ([5, 9, 20, 7], [8, 30])]
    check_greedy_replay(CachedModel(model), drafter, sources)


@pytest.mark.parametrize("mode", ["blocks", "linked"])
def test_greedy_replay_behind_the_targets_states_equals_decoding(mode, monkeypatch):
    monkeypatch.setattr(candidates, "CANDIDATES", VOCAB)
    model = tiny_model("llama", num_hidden_layers=4)
    model.generation_config.eos_token_id = None
    drafter = make_drafter(behind_states(model, [2, 3], mode), model)
    sources = [make_source(ids, model) for ids in ([5, 9, 20, 7], [8, 30], [21, 4, 11])]
    check_greedy_replay(CachedModel(model), drafter, sources)


@pytest.mark.parametrize("mode", ["masks", "linked", "causal slots"])
def test_shorter_blocks_are_priced_as_such_on_the_trace_of_longer_ones(mode, monkeypatch):
    """Where slots see none behind them, one trace serves blocks of every length."""
    monkeypatch.setattr(candidates, "CANDIDATES", VOCAB)
    family = "marian" if mode == "causal slots" else "llama"
    model = tiny_model(family, **({"num_hidden_layers": 4} if mode == "linked" else {}))
    model.generation_config.eos_token_id = None
    if mode == "causal slots":
        drafter = tiny_drafter(family, decoder_layers=2, **CONVENTIONS[mode])
        for parameter in drafter.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        drafter = BlockDrafter(drafter)
    elif mode == "masks":
        drafter = noisy(model, "llama", 0.05)
        drafter.config.pard_token, drafter.config.k = MASK, 4
        drafter = make_drafter(drafter)
    else:
        drafter = make_drafter(behind_states(model, [2, 3], mode), model)
    assert not lengths_differ(drafter)
    target, randomness = CachedModel(model), SampledRandomness(torch.Generator())
    source = target.read(make_source(torch.tensor([5, 9, 20, 7]), model))
    text = decode_text(target, drafter, source, TraceOptions(GREEDY, 15, 4), randomness)
    policies = [Candidate("fixed", 2), Candidate("entropy", 2.0, max_draft=2)]
    short, long = (
        replay(
            log_block_trace(
                target, drafter, source, text, TraceOptions(GREEDY, 15, depth), randomness
            ),
            {},
            policies,
        )
        for depth in (2, 4)
    )
    assert (short.drafted > 0).all()
    for name, fact in vars(short).items():
        assert np.array_equal(fact, getattr(long, name)), name


def check_greedy_replay(target: CachedModel, drafter: SlotDrafter, sources: Sequence[Source]):
    head, slots, randomness = random_head(16), 4, SampledRandomness(torch.Generator())
    pairs = [
        (FixedLength(4), Candidate("fixed", 4)),
        (Entropy(2.0, 4), Candidate("entropy", 2.0, max_draft=4)),
        (Cumulative(0.05, 4), Candidate("cumulative", 0.05, max_draft=4)),
        (Logistic(0.9, 4), Candidate("logistic", 0.9, max_draft=4)),
        (Bandit(0.2, 4), Candidate("bandit", 0.2, max_draft=4)),
        (HeadPolicy(head, 0.4, 4), Candidate("head", 0.4, "D", 4)),
        (HeadPolicy(head, 0.1, 4), Candidate("head", 0.1, "D", 4)),
    ]
    found = set()
    for source in map(target.read, sources):

        def decode(drafts, stop, source=source):
            decoder = Decoder(target, drafts, stop, GreedyMatch(), GREEDY, lambda _: randomness)
            return decoder.decode_all([source], 15)[0]

        text = decode(NoDrafter(), FixedLength(1)).tokens
        options = TraceOptions(GREEDY, 15, slots)
        trace = log_block_trace(target, drafter, source, text, options, randomness)
        for stop, candidate in pairs:
            output = decode(drafter, stop)
            assert output.tokens == text
            rounds = decoded_rounds(output)
            assert replayed_rounds(trace, candidate, head) == rounds, candidate.name
            check_counts(trace, candidate, head, output)
            found |= {(drafted, accepted) for _, drafted, accepted in rounds}
    assert len(found) > 4, "the pair is too simple to show anything"


@pytest.mark.parametrize("kind", ["fixed", "entropy", "head"])
@pytest.mark.parametrize(
    "settings",
    [
        {"slots": "anchored"},
        {"slots": "paper", "previous_token_rank": 3},
        CONVENTIONS["first fed"],
        CONVENTIONS["first fed, coupled"],
        MASKS,
        STATES,
        LINKED_STATES,
    ],
)
def test_replayed_blocks_have_the_law_of_decoding(settings, kind):
    law, replayed = laws(settings, kind, "rejection")
    assert total_variation(law, replayed) < 1e-9


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"slots": "anchored"}, "fixed"),
        ({"slots": "anchored"}, "entropy"),
        ({"slots": "anchored"}, "head"),
        ({"slots": "paper", "previous_token_rank": 3}, "fixed"),
        ({"slots": "paper", "previous_token_rank": 3}, "head"),
        (CONVENTIONS["first fed, coupled"], "fixed"),
        (MASKS, "entropy"),
        (MASKS, "head"),
        (STATES, "entropy"),
        (LINKED_STATES, "head"),
    ],
)
def test_replayed_blocks_of_block_verification_have_its_law(settings, kind):
    law, replayed = laws(settings, kind, "block")
    assert total_variation(law, replayed) < 1e-9


def laws(settings, kind, rule):
    """Outputs and rounds together, of decoding under a rule and of its replay."""
    target = ToyTarget(vocabulary=4, seed=1)
    if "behind" in settings:
        model = tiny_model("llama", num_hidden_layers=4, vocab_size=4, bos_token_id=2)
        drafter = make_drafter(behind_states(model, [1, 3], settings["behind"], k=3), model)
        source, head, target = make_source([2, 3, 2], model), random_head(16), CachedModel(model)
    elif settings == MASKS:
        drafter = parallel(seed=3, vocab_size=4, bos_token_id=2, eos_token_id=1)
        source, head = toy_prompt(), random_head(16)
    else:
        drafter, source, head = toy_drafter(**settings), toy_source(), random_head(8)
    sampling, max_new_tokens, slots = Sampling(1.0, top_k=2), 4, 3
    options = TraceOptions(sampling, max_new_tokens, slots, verifier=rule)
    seeded = SampledRandomness(torch.Generator().manual_seed(0))
    seen = log_block_trace(target, drafter, source, [2, 3, 2, 3], options, seeded)
    # so that the entropy policy stops now and then; off the quantile, where rounding would decide
    nats = float(np.quantile(seen.rows[:, 0], 0.7)) + 1e-9
    stop, candidate = {
        "fixed": (FixedLength(3), Candidate("fixed", 3)),
        "entropy": (Entropy(nats, 3), Candidate("entropy", nats, max_draft=3)),
        "head": (HeadPolicy(head, 0.3, 3), Candidate("head", 0.3, "D", 3)),
    }[kind]

    def decode(randomness):
        decoder = Decoder(
            target, drafter, stop, make_verifier(rule), sampling, lambda _: randomness
        )
        output = decoder.decode_all([source], max_new_tokens)[0]
        return tuple(output.tokens), tuple(decoded_rounds(output))

    def replay_one(randomness):
        plain = Decoder(
            target, NoDrafter(), FixedLength(1), RejectionSampling(), sampling, lambda _: randomness
        )
        text = plain.decode_all([source], max_new_tokens)[0].tokens
        trace = log_block_trace(target, drafter, source, text, options, randomness)
        return tuple(text), tuple(replayed_rounds(trace, candidate, head))

    law, replayed = enumerate_law(decode), enumerate_law(replay_one)
    assert len({rounds for _, rounds in law}) > 2, "the pair is too simple to show anything"
    return law, replayed


def test_slots_of_several_tosses_share_their_states():
    target, drafter = ToyTarget(vocabulary=4, seed=1), toy_drafter(slots="anchored")
    options = TraceOptions(Sampling(1.0), 6, depth=3, replicates=3)
    randomness = SampledRandomness(torch.Generator().manual_seed(0))
    trace = log_block_trace(target, drafter, toy_source(), [2, 3, 2, 3], options, randomness)
    assert trace.run.shape == (3, 4)
    assert np.array_equal(trace.index[0], trace.index[1])
    assert len(trace.states) == int(trace.longest[0].sum()) == 3 + 3 + 3 + 2


def test_replay_couples_the_same_candidates_as_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "CANDIDATES", 2)
    settings = {"slots": "paper", "previous_token_rank": 3}
    test_replayed_blocks_have_the_law_of_decoding(settings, "fixed")
