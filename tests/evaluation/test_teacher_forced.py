"""Teacher-forced rounds are the rounds that decoding runs."""

import pytest
import torch

from drafttrain.decoding.drafters.causal import blocks_of
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.teacher_forced import replay_rounds
from tests.evaluation.scripted import ScriptedDrafter, noisy_blocks, plain_tokens

EOS = 1


def facts(rounds):
    return [(list(r.drafted), len(r.path), list(r.emitted), r.passes, r.finished) for r in rounds]


def test_rounds_start_after_the_accepted_tokens_and_the_one_more():
    reference = [5, 6, 7, 8, EOS]
    predicted = torch.tensor([[5, 6, 9], [0, 0, 0], [0, 0, 0], [8, EOS, 4], [0, 0, 0]])
    rounds = replay_rounds(predicted, reference)
    assert [(list(r.path), list(r.emitted)) for r in rounds] == [
        ([0, 1], [5, 6, 7]),
        ([0, 1], [8, EOS]),  # EOS inside the draft: no bonus
    ]
    assert [r.finished for r in rounds] == [False, True]


def test_always_wrong_blocks_give_one_token_a_round():
    assert len(replay_rounds(torch.zeros(4, 3), [5, 6, 7, EOS])) == 4


def test_perfect_blocks_of_k_give_k_plus_one_tokens_a_round():
    reference = list(range(2, 14))
    blocks = noisy_blocks(reference, k=3, wrong=0.0, seed=0)
    assert len(replay_rounds(blocks, reference)) == 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_new_tokens", [5, 30])
def test_replayed_rounds_equal_those_of_decoding(tiny_marian, seed, max_new_tokens):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 40, (6,), generator=generator).tolist()
    tokens = plain_tokens(tiny_marian, ids, max_new_tokens)
    blocks = noisy_blocks(tokens, k=4, wrong=0.3, seed=seed)
    decoded = Decoder(
        CachedModel(tiny_marian),
        ScriptedDrafter({tuple(ids): blocks}),
        FixedLength(4),
        GreedyMatch(),
        Sampling(),
        lambda _: SampledRandomness(torch.Generator()),
    ).decode_all([make_source(ids, tiny_marian)], max_new_tokens)[0]
    assert tokens == decoded.tokens
    assert facts(replay_rounds(blocks, tokens, max_new_tokens)) == facts(decoded.rounds)


def test_blocks_must_cover_every_prefix():
    with pytest.raises(ValueError, match="2 prefixes but the reference has 3 tokens"):
        replay_rounds(torch.zeros(2, 3), [5, 6, EOS])


def test_where_a_block_begins_with_no_token_nothing_is_drafted():
    first, second = replay_rounds(torch.tensor([[-1, -1], [5, 6], [-1, -1]]), [4, 5, 6])
    assert (first.drafted, first.passes, list(first.emitted)) == ([], 0, [4])
    assert (second.drafted, second.passes, list(second.emitted)) == ([5, 6], 1, [5, 6])


def test_drafts_along_an_output_are_the_rows_that_follow_each_prefix():
    best = torch.tensor([7, 8, 9, 3])
    assert blocks_of(best, 4, 3).tolist() == [[7, 8, 9], [8, 9, 3], [9, 3, -1], [3, -1, -1]]
    assert blocks_of(best[:2], 3, 2).tolist() == [[7, 8], [8, -1], [-1, -1]]
