"""Tree drafters: their trees and caches, and pairings that are refused."""

from functools import cache

import pytest
import torch

from drafttrain.decoding.batching import BatchedSteps
from drafttrain.decoding.drafters.block import BlockDrafter
from drafttrain.decoding.drafters.causal import CausalDrafter
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.tree import ModelRows, TreeDrafter
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.stopping import FixedLength, Gain
from drafttrain.decoding.trees.chosen import Optimal
from drafttrain.decoding.trees.drawn import Beam, Branching, Paths
from drafttrain.decoding.trees.fixed import binary_tree, eagle_tree
from drafttrain.decoding.trees.shapes import Shape
from drafttrain.decoding.trees.verifiers import KSeq, RecursiveRejection
from drafttrain.decoding.types import Output, Proposal, Sampling
from drafttrain.models.spec_drafter.model import SpecDrafter
from tests.decoding.decoded import decoder_of, propose
from tests.decoding.drafters.watched import Watched
from tests.decoding.engine.fresh import close_caches, fresh
from tests.decoding.paths import paths_of
from tests.decoding.toys import ToyModel, toy_prompt
from tests.tiny_drafters import noisy, shared, tiny_drafter
from tests.tiny_models import tiny_model


def toy(shape: Shape) -> TreeDrafter:
    return TreeDrafter(CausalDrafter(ToyModel(2)), shape)


class WholeRows:
    """A tree shape that always gets whole rows."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def __getattr__(self, name: str):
        return getattr(self.shape, name)

    def likeliest(self, sampling: Sampling) -> None:
        return None


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        (Optimal(60), 0),
        (Optimal(60), 3),
        (Optimal(60, draft_temperature=0.2), 3),
        (Optimal(9), 0),
        (Optimal(9), 3),
        (binary_tree(14), 0),
    ],
)
def test_trees_of_the_likeliest_tokens_are_those_of_whole_rows(shape, rank):
    """60 candidates exceed the vocabulary, so previous-token features apply to all tokens."""
    drafter = BlockDrafter(slots_model(rank))
    source = make_source([5, 9, 20, 7, 1], shared("marian"))
    drafters = (TreeDrafter(drafter, requests) for requests in (shape, WholeRows(shape)))
    likeliest, whole = (propose(one, source) for one in drafters)
    assert likeliest.passes == whole.passes == 1
    assert set(paths_of(likeliest)) == set(paths_of(whole))
    assert likeliest.expected == pytest.approx(whole.expected, abs=1e-6)


def slots_model(rank: int) -> SpecDrafter:
    """Returns a small drafter whose previous-token features, if any, change its outputs."""
    model = tiny_drafter("marian", decoder_layers=2, previous_token_rank=rank)
    if rank:
        torch.manual_seed(5)
        torch.nn.init.normal_(model.previous_token.out.weight, std=0.5)
    return model


# --- on real models ------------------------------------------------------------------------------

SHAPES: dict[str, Shape] = {
    "paths": Paths(3),
    "rsd-c": Branching((3, 2, 1)),
    "rsd-s": Beam(4),
    "opt-tree": Optimal(12),
    "binary": binary_tree(10),
    "eagle": eagle_tree(),
}


def checked(drafter: TreeDrafter, kept: list[int]) -> Watched:
    """Compares the drafter's cache with a fresh prefill of its path before each extension, and
    notes how many draft tokens of the last round are in it."""
    lengths: list[int] = []

    def watch(session, source, tokens, target_state, stop) -> BatchedSteps[Proposal]:
        assert isinstance(session.rows, ModelRows)
        model = session.rows.model
        forward_batch = model.forward_batch

        def watched(requests):
            [request] = requests
            if lengths and request.visible is None:
                state = request.state
                assert state.tokens == tokens[: state.cached].tolist()
                close_caches(state, fresh(model.model, source, state.tokens).past_key_values)
                kept.append(state.cached - lengths[-1])
            return forward_batch(requests)

        model.forward_batch = watched
        proposal = yield from session.propose(tokens, target_state, stop)
        del model.forward_batch
        lengths.append(len(tokens))
        return proposal

    return Watched(drafter, watch)


PROMPT = [5, 9, 20]


@cache
def endless_pair(family: str) -> tuple[CachedModel, Output, CausalDrafter]:
    """Returns a target without EOS, so that it generates to the maximal length, its output, and a
    drafter."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    copy = noisy(model, family)
    copy.generation_config.eos_token_id = None
    target = CachedModel(model)
    [plain] = decoder_of(target, NoDrafter()).decode_all([make_source(PROMPT, model)], 24)
    return target, plain, CausalDrafter(CachedModel(copy))


@pytest.mark.covered
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("family", ["llama", "opt", "marian", "t5"])
def test_greedy_trees_equal_plain_decoding_and_keep_accepted_nodes(family, name):
    target, plain, causal = endless_pair(family)
    drafter = checked(TreeDrafter(causal, SHAPES[name]), kept := [])
    source = make_source(PROMPT, target.model)
    [found] = decoder_of(target, drafter, 3).decode_all([source], 24)
    assert found.tokens == plain.tokens
    assert len(plain.tokens) == 24 and len(found.rounds) < len(plain.rounds)
    assert max(kept) > 0
    for played in found.rounds:
        assert played.levels <= played.passes <= 3  # a level's nodes may all be displaced
        assert len(played.path) <= played.levels
        assert list(played.path) == sorted(played.path)


# --- refusals ------------------------------------------------------------------------------------


REFUSED = {
    "not valid for without_replacement trees": (Branching((2, 2)), FixedLength(2), KSeq),
    "reads the expected acceptance": (Beam(2), Gain(0.5, 2), RecursiveRejection),
}
"""One of each kind; the others are in the table of tests/build/test_trees.py."""


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_pairings_are_refused_before_anything_runs(message):
    shape, stop, verifier = REFUSED[message]
    decoder = decoder_of(None, toy(shape), stop, verifier, Sampling(1.0))  # no target is needed
    with pytest.raises(ValueError, match=message):
        decoder.decode([toy_prompt()], 3)


def test_a_target_that_cannot_be_given_trees_is_refused_before_anything_runs():
    class Flat(ToyModel):
        def check_tree_attention(self) -> None:
            raise ValueError("this attention takes no tree mask")

    decoder = decoder_of(Flat(1), toy(Beam(2)), 2, RecursiveRejection, Sampling(1.0))
    with pytest.raises(ValueError, match="takes no tree mask"):
        decoder.decode([toy_prompt()], 3)
