"""Drafters with more or fewer embedding rows than their target are exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.build.pairs import make_drafter
from drafttrain.decoding.drafters.cascade import Level, cascade
from drafttrain.decoding.drafters.causal import teacher_forced_rows
from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import SeveralDrafters, TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.forward import fit_scores, known_ids
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.sampling import sequence_randomness
from drafttrain.decoding.stopping import Confidence, Entropy, FixedLength
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Branching, Paths
from drafttrain.decoding.trees.fixed import Fixed, eagle_tree
from drafttrain.decoding.trees.verifiers import MultiRound, RecursiveRejection, TargetWalk
from drafttrain.decoding.types import Output, Sampling
from drafttrain.decoding.verifiers import BlockVerification, GreedyMatch, RejectionSampling
from tests.comparing import close
from tests.decoding.decoded import decoder_of
from tests.decoding.enumeration import enumerate_output, total_variation
from tests.decoding.test_batch_exactness import PROMPTS, law_of_model
from tests.tiny_models import VOCAB, near_copy, tiny_model

LONGEST = 2
FEWER, MORE = VOCAB - 7, VOCAB + 8
Make = Callable[[PreTrainedModel, int], Drafter]


def with_rows(target: PreTrainedModel, rows: int, seed: int = 1) -> PreTrainedModel:
    """Returns a noisy copy of a Llama with another number of rows; additional rows are likely to
    be drafted."""
    torch.manual_seed(seed)
    other = type(target)(type(target.config)(**target.config.to_dict() | {"vocab_size": rows}))
    state = {name: value.clone() for name, value in near_copy(target, 0.3, seed).named_parameters()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        further = 3.0 * torch.randn(max(rows - len(state[name]), 0), state[name].shape[1])
        state[name] = torch.cat([state[name][:rows], further.to(state[name])])
    other = other.double().eval()
    other.load_state_dict(state)
    other.generation_config = target.generation_config
    return other


def parallel(target: PreTrainedModel, rows: int) -> Drafter:
    """Returns a drafter whose mask is the last row, which the target lacks if it has fewer rows."""
    model = with_rows(target, rows)
    model.config.pard_token, model.config.k = rows - 1, 3
    return make_drafter(model, target)


def chain(target: PreTrainedModel, rows: int, seed: int = 1) -> Drafter:
    return make_drafter(with_rows(target, rows, seed), target)


def few_tokens(target: PreTrainedModel, rows: int) -> Drafter:
    """Returns a drafter of some of its tokens, including the last."""
    model = with_rows(target, rows)
    model.config.draftable_tokens = [1, rows - 1]
    return make_drafter(model, target)


def levels(target: PreTrainedModel, rows: int) -> Drafter:
    """Returns a cascade: a model with other rows reviews one with the target's, which reviews
    copies."""
    several = [Level("one", chain(target, rows)), Level("two", chain(target, len_of(target), 2))]
    return cascade([*several, Level("max-gram", MaxGramDrafter())], [[1, 1, 0], [1, 0], [1]], 1.5)


def turned(target: PreTrainedModel, rows: int) -> Drafter:
    several = [Level("one", chain(target, len_of(target))), Level("two", chain(target, rows, 2))]
    return cascade(several, [[1, 1], [1]], 1.5)


def several_drafters(target: PreTrainedModel, rows: int) -> Drafter:
    both = (TreeDrafter(chain(target, rows, seed), Paths(1)) for seed in (1, 2))
    return SeveralDrafters([*both])


def len_of(target: PreTrainedModel) -> int:
    return target.config.vocab_size


def tree(shape) -> Make:
    return lambda target, rows: TreeDrafter(chain(target, rows), shape)


SAMPLED: dict[str, tuple[Make, StopPolicy, object]] = {
    "chain": (chain, FixedLength(2), RejectionSampling()),
    "chain that stops, by blocks": (chain, Entropy(0.6, 2), BlockVerification()),
    "of few tokens": (few_tokens, FixedLength(2), RejectionSampling()),
    "block": (parallel, FixedLength(2), RejectionSampling()),
    "cascade": (levels, FixedLength(2), RejectionSampling()),
    "cascade, turned round": (turned, FixedLength(2), RejectionSampling()),
    "opt-tree": (tree(Optimal(4)), FixedLength(2), TargetWalk),
    "rsd-c": (tree(Branching((2, 1))), FixedLength(2), RecursiveRejection),
    "several drafters": (several_drafters, FixedLength(1), MultiRound),
}


TOGETHER = ("chain", "block", "cascade", "rsd-c")
"""Drafters that are enumerated in a batch with other sequences."""
CASES = [(name, 3 if name in TOGETHER else 1) for name in SAMPLED]


@pytest.mark.parametrize("rows", [3, 6], ids=["smaller", "larger"])
@pytest.mark.parametrize(("name", "sequences"), CASES)
def test_outputs_follow_the_target_exactly(name, rows, sequences):
    target = tiny_model("llama", vocab_size=4)
    target.lm_head.weight.data *= 0.3  # flatter, so that all rows matter
    make, stop, verifier = SAMPLED[name]
    sampling, drafter = Sampling(1.0), make(target, rows)
    decoder = decoder_of(target, drafter, stop, verifier, sampling)
    sources = [make_source(prompt, target) for prompt in PROMPTS[1:]]  # of tokens 2 and 3
    law = enumerate_output(decoder, sources[:sequences], LONGEST, 0, sequences)
    expected = law_of_model(target, sources[0], sampling, LONGEST)
    assert abs(sum(law.values()) - 1.0) < 1e-12 and len(expected) > 3
    assert any(3 in tokens[:-1] for tokens in expected)  # the smaller model has no row for 3
    assert total_variation(law, expected) < 1e-12


GREEDY: dict[str, tuple[Make, StopPolicy, object]] = {
    name: (make, FixedLength(4), TargetWalk if verifier is TargetWalk else GreedyMatch())
    for name, (make, _, verifier) in SAMPLED.items()
    if name not in ("rsd-c", "several drafters")
}
GREEDY |= {
    "chain that stops": (chain, Confidence(0.2, 4), GreedyMatch()),
    "eagle": (tree(eagle_tree()), FixedLength(4), TargetWalk),
    "all siblings": (
        lambda target, rows: TreeDrafter(
            made := chain(target, rows), Fixed(frozenset((n,) for n in range(made.vocabulary)))
        ),
        FixedLength(1),
        TargetWalk,
    ),
}


def decode(target: PreTrainedModel, drafter, stop, verifier, sampling, batch_size) -> list[Output]:
    randomness = partial(sequence_randomness, 0)
    decoder = decoder_of(target, drafter, stop, verifier, sampling, randomness)
    prompts = ([5, 39, 7], [38, 12], [9, 9, 30, 4, 22], [36, 37, 38])
    return decoder.decode_all([make_source(p, target) for p in prompts], 20, batch_size)


@pytest.mark.parametrize("rows", [FEWER, MORE], ids=["smaller", "larger"])
@pytest.mark.parametrize("name", GREEDY)
def test_greedy_outputs_are_the_targets_own_and_no_strange_token_is_drafted(name, rows):
    target, plain = tiny_model("llama"), (NoDrafter(), FixedLength(1), GreedyMatch(), Sampling())
    make, stop, verifier = GREEDY[name]
    found = decode(target, make(target, rows), stop, verifier, Sampling(), 3)
    expected = decode(target, *plain, 3)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    drafted = {token for one in found for played in one.rounds for token in played.drafted}
    if name != "cascade":  # its last level copies tokens it has read
        assert drafted and max(drafted) < min(rows, VOCAB)


@pytest.mark.parametrize("rows", [FEWER, MORE], ids=["smaller", "larger"])
def test_scores_are_the_drafters_own(rows):
    target = tiny_model("llama")
    model = with_rows(target, rows)
    fitted, own = make_drafter(model, target).model, CachedModel(model)
    source, known = make_source([5, 6, 7], target), min(rows, VOCAB)
    one, other = (
        model.extend_cache(model.encode(source), source.prefix).logits for model in (fitted, own)
    )
    assert one.shape == (1, VOCAB) and fitted.vocabulary == known
    close(one[:, :known], other[:, :known])
    assert (one[:, known:] == -torch.inf).all()
    along = teacher_forced_rows(fitted, source, torch.tensor([39, 38, 5, 9]))
    assert along.shape == (4, VOCAB)
    assert along.argmax(-1).max() < known


def test_scores_are_padded_or_cut_and_ids_are_held_to_the_rows():
    row = torch.tensor([[1.0, 2.0, 3.0]])
    assert fit_scores(row, 5).tolist() == [[1.0, 2.0, 3.0, -torch.inf, -torch.inf]]
    assert fit_scores(row, 2).tolist() == [[1.0, 2.0]]
    assert fit_scores(row, 3).tolist() == row.tolist()
    assert known_ids(torch.tensor([[0, 2, 3, 9]]), 3).tolist() == [[0, 2, 2, 2]]
