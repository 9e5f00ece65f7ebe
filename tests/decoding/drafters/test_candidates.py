"""Candidates: a chain takes the best token of each slot given the one before, in any batch."""

import numpy as np
import torch

from drafttrain.decoding.drafters.candidates import (
    CANDIDATES,
    LikelyTokens,
    PreviousTokenCorrection,
)

VOCABULARY, RANK = 5 * CANDIDATES, 6


def test_chains_of_a_batch_equal_those_of_single_sequences():
    torch.manual_seed(0)
    rows, features = torch.randn(2, VOCABULARY, RANK, dtype=torch.float64)
    lengths, last = [3, 1, 4], [5, 9, 0]
    logits = torch.randn(8, VOCABULARY, dtype=torch.float64)
    from_hidden = torch.randn(8, RANK, dtype=torch.float64)
    correction = PreviousTokenCorrection(lambda hidden: hidden, rows, features)
    requests = list(zip(from_hidden.split(lengths), logits.split(lengths), last, strict=True))
    for one, chain in zip(requests, correction.chains(requests), strict=True):
        assert correction.chains([one])[0].tolist() == chain.tolist()


def test_the_token_before_decides_among_candidates():
    """Two slots: token 1 is followed by 3 and token 2 by 4, whose own scores are equal."""
    rows, features = torch.zeros(2, VOCABULARY, 2)
    features[1], features[2] = torch.tensor([9.0, -9.0]), torch.tensor([-9.0, 9.0])
    rows[3], rows[4] = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    logits = torch.zeros(2, VOCABULARY)
    logits[0, 2], logits[1, 3:5] = 1.0, 1.0
    for first, second in ((2, 4), (1, 3)):
        logits[0, first] = 2.0
        correction = PreviousTokenCorrection(lambda hidden: hidden, rows, features)
        [chain] = correction.chains([(torch.zeros(2, 2), logits, 0)])
        assert chain.tolist() == [first, second]


def test_tables_of_a_type_that_numpy_does_not_know_score_alike():
    torch.manual_seed(0)
    rows, features = torch.randn(2, VOCABULARY, RANK).bfloat16()
    states, logits = torch.randn(3, RANK), torch.randn(3, VOCABULARY)
    found = []
    for tables in ((rows.float(), features.float()), (rows, features)):
        correction = PreviousTokenCorrection(lambda hidden: 2 * hidden, *tables)
        likely = LikelyTokens(states, logits, (20, 0.7), correction)
        above = likely.tokens[0, [7, 0, 3]].tolist()
        found.append([likely.after(0, [5]), likely.after(1, above), likely.after(2, [above[0]])])
        found[-1].append((correction.chains([(states, logits, 5)])[0].numpy(), 0.0))
    for (tokens, log_probs), (others, same) in zip(*found, strict=True):
        assert (tokens == others).all()
        assert np.abs(log_probs - same).max() < 1e-5
