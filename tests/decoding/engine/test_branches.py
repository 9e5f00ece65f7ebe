"""Trees and branches: each node's logits are those of its path alone."""

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafttrain.decoding.engine.cache import ColumnCache
from drafttrain.decoding.engine.cached_model import CachedModel, ancestry
from drafttrain.decoding.engine.requests import ForwardOutput, ForwardRequest
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.types import Proposal
from tests.comparing import close
from tests.decoding.engine.fresh import (
    PATHS,
    TREE,
    close_caches,
    extend,
    fresh,
    last_hidden,
    precision_of,
)
from tests.decoding.paths import nodes_to, tokens_to
from tests.tiny_families import ATTENTIONS, any_family
from tests.tiny_models import VOCAB, tiny_model, tiny_source

PROMPT = PATHS[0]
NODES, PARENTS = TREE.tokens, TREE.parents
DEFAULT_ATTENTION = dict(reversed(ATTENTIONS))
"""One attention implementation per family; test_batches.py tries all of them."""


def extend_tree(
    model: CachedModel, state: SequenceState, tokens: Tensor, visible: Tensor, positions: Tensor
) -> ForwardOutput:
    given = tokens.tolist(), len(tokens), visible, positions.tolist()
    return model.forward_batch([ForwardRequest(state, *given)])[0]


def load(family: str, attention: str) -> PreTrainedModel:
    model = any_family(family)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(("family", "attention"), DEFAULT_ATTENTION.items())
def test_trees_grown_level_by_level_equal_single_paths(family, attention):
    """As drafters grow trees, one level per call after the earlier levels."""
    model = load(family, attention)
    drafter, source = CachedModel(model), tiny_source(PROMPT, model)
    # enough tokens that T5 has relative distances in several buckets
    state, tokens = drafter.encode(source), [*source.prefix.tolist(), 21, 6, 30, 15, 21, 6, 33, 8]
    extend(drafter, state, torch.tensor(tokens))
    lines, length = ancestry(PARENTS), len(tokens)
    for level in ([0, 1], [2, 3, 4], [5, 6]):
        visible = torch.ones(len(level), state.cached + len(level), dtype=torch.bool)
        visible[:, length:] = lines[level, : level[-1] + 1]
        depths = lines[level].sum(dim=1)
        score = extend_tree(drafter, state, NODES[level], visible, length - 1 + depths)
        for row, node in enumerate(level):
            reference = fresh(model, source, [*tokens, *tokens_to(TREE, node)])
            close(score.logits[row], reference.logits[0, -1], precision_of(model))
            close(score.hidden[row], last_hidden(reference)[-1], precision_of(model))
    columns = [*range(length), *(length + node for node in (0, 3, 6))]
    drafter.keep_columns(state, columns)
    path = [*tokens, *tokens_to(TREE, 6)]
    close_caches(state, fresh(model, source, path).past_key_values, precision_of(model))
    score = extend(drafter, state, torch.tensor([*path, 27]))
    assert len(score.hidden) == 1  # kept tokens are not computed again
    expected = fresh(model, source, [*path, 27]).logits[0, -1]
    close(score.logits[-1], expected, precision_of(model))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_tree_that_fails_leaves_the_models_own_positions_as_they_were(family):
    model = any_family(family)
    target, source = CachedModel(model), tiny_source(PROMPT, model)
    before = fresh(model, source, [1, 5, 6]).logits
    outside = torch.where(NODES == 30, VOCAB + 100, NODES)
    with pytest.raises(IndexError):
        target.score([(target.encode(source), source.prefix, Proposal(outside, PARENTS))])
    close(fresh(model, source, [1, 5, 6]).logits, before)


def two_branches(drafter: CachedModel, source) -> SequenceState:
    """Caches two branches after the prompt's three columns: 8 30 in columns 3 and 5, and 9 11 in
    columns 4 and 6."""
    state = drafter.encode(source)
    extend(drafter, state, torch.tensor(PROMPT))
    for pair in ([8, 9], [30, 11]):
        start, depth = state.cached, state.cached // 2
        visible = torch.zeros(2, start + 2, dtype=torch.bool)
        visible[:, :3] = True
        for row in (0, 1):
            visible[row, 3 + row :: 2] = True
        extend_tree(drafter, state, torch.tensor(pair), visible, torch.tensor([depth + 2] * 2))
    return state


def test_cached_branches_are_kept_or_forgotten_before_a_chain_goes_on():
    model = tiny_model("llama")
    drafter, source = CachedModel(model), tiny_source(PROMPT, model)
    state = two_branches(drafter, source)
    with pytest.raises(AssertionError, match="tree nodes are cached"):
        extend(drafter, state, torch.tensor(PROMPT))
    with pytest.raises(AssertionError, match="a chain after tree nodes"):
        drafter.forward_batch([ForwardRequest(state, [5], 1)])
    state.forget(len(PROMPT))
    score = extend(drafter, state, torch.tensor([*PROMPT, 9, 11]))
    close(score.logits[-1], fresh(model, source, [*PROMPT, 9, 11]).logits[0, -1])


def test_columns_that_are_first_are_kept_without_a_copy(monkeypatch):
    model = tiny_model("llama")
    drafter = CachedModel(model)
    state = two_branches(drafter, tiny_source(PROMPT, model))
    monkeypatch.setattr(ColumnCache, "move", lambda *_: pytest.fail("columns were copied"))
    drafter.keep_columns(state, [0, 1, 2, 3])
    drafter.keep_columns(state, [])
    assert state.cached == 0


def test_columns_that_are_no_path_are_refused():
    model = tiny_model("llama")
    drafter = CachedModel(model)
    state = two_branches(drafter, tiny_source(PROMPT, model))
    for columns in ([0, 1, 2, -1], [0, 1, 2, 3, 4], [0, 2]):
        with pytest.raises(AssertionError, match="no path"):
            drafter.keep_columns(state, columns)
        assert state.cached == 7


def test_masks_of_random_trees_hold_the_ancestors_only():
    generator = torch.Generator().manual_seed(0)
    for size in [*range(9), 60]:
        parents = [int(torch.randint(-1, node, (), generator=generator)) for node in range(size)]
        parents = torch.tensor(parents, dtype=torch.long)
        expected = torch.zeros(size, size, dtype=torch.bool)
        for node in range(size):
            expected[node, nodes_to(parents, node)] = True
        assert torch.equal(ancestry(parents), expected)


@pytest.mark.parametrize("family", ["llama", "opt", "bart", "t5"])
def test_trees_are_right_with_any_attention_implementation(family):
    AttentionInterface.register("makes_its_own_mask", sdpa_attention_forward)
    AttentionMaskInterface.register("makes_its_own_mask", sdpa_mask)
    model = load(family, "makes_its_own_mask")
    target, source = CachedModel(model), tiny_source(PROMPT, model)
    [score] = target.score([(target.encode(source), source.prefix, TREE)])
    for node in (-1, 3, 6):
        reference = fresh(model, source, [*source.prefix.tolist(), *tokens_to(TREE, node)])
        close(score.logits[node + 1], reference.logits[0, -1])


def test_trees_are_refused_where_they_have_other_logits_than_their_paths():
    """Bloom derives positions from a one-dimensional mask, so it supports only chains."""
    model = any_family("Bloom")
    target, source = CachedModel(model), tiny_source(PROMPT, model)
    assert not target.supports_tree_attention
    state, reason = target.encode(source), "'bloom' model does not support draft trees: .*chains"
    with pytest.raises(ValueError, match=reason):
        target.check_tree_attention()
    with pytest.raises(ValueError, match=reason):
        target.score([(state, source.prefix, TREE)])
    with pytest.raises(ValueError, match=reason):
        one = torch.tensor([5])
        extend_tree(target, state, one, torch.ones(1, 1, dtype=torch.bool), torch.tensor([0]))
    assert state.cached == 0
