"""Trees and branches: each node's row is that of its path run alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.decoding.cached_model import CachedModel, SequenceState, ancestry, make_source
from drafttrain.decoding.types import Proposal
from tests.decoding.test_cached_model import (
    PATHS,
    close,
    close_caches,
    fresh,
    last_hidden,
    precision_of,
)
from tests.tiny_models import CAUSAL_FAMILIES, tiny_model

PROMPT = PATHS[0]
NODES = torch.tensor([8, 9, 8, 30, 11, 12, 13])
PARENTS = torch.tensor([-1, -1, 0, 0, 1, 3, 3])
"""Two roots; two children of the first, two of its second child; one child of the second root."""


def path_to(node: int) -> list[int]:
    tokens = []
    while node >= 0:
        tokens.append(int(NODES[node]))
        node = int(PARENTS[node])
    return tokens[::-1]


def models():
    for family in CAUSAL_FAMILIES:
        for attention in ("sdpa", "eager"):
            yield family, attention


def load(family: str, attention: str):
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize(("family", "attention"), models())
def test_tree_logits_equal_each_path_run_alone(family, attention):
    model = load(family, attention)
    target, source = CachedModel(model), make_source(PROMPT, model)
    state = target.encode(source)
    tokens = torch.tensor([*PROMPT, 21, 6])
    target.score([state], [tokens[:-1]], [Proposal.chain(torch.tensor([33]))])  # something to drop
    target.keep(state, torch.arange(0))
    [score] = target.score([state], [tokens], [Proposal(NODES, PARENTS)])
    assert score.logits.shape[0] == score.hidden.shape[0] == len(NODES) + 1
    for node in range(-1, len(NODES)):
        reference = fresh(model, source, [*tokens.tolist(), *path_to(node)])
        close(score.logits[node + 1], reference.logits[0, -1], precision_of(model))
        close(score.hidden[node + 1], last_hidden(reference)[-1], precision_of(model))


@pytest.mark.parametrize("node", range(-1, len(NODES)))
@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_the_cache_after_a_tree_equals_a_fresh_prefill_of_the_kept_path(family, node):
    model = tiny_model(family)
    target, source = CachedModel(model), make_source(PROMPT, model)
    state = target.encode(source)
    target.score([state], [source.prefix], [Proposal(NODES, PARENTS)])
    lines = ancestry(PARENTS)
    kept = lines[node].nonzero().flatten() if node >= 0 else torch.arange(0)
    target.keep(state, kept)
    path = [*PROMPT, *path_to(node)]
    assert state.tokens == path
    close_caches(state, fresh(model, source, path).past_key_values)
    path.append(27)  # the correction
    [score] = target.score([state], [torch.tensor(path)], [Proposal(NODES, PARENTS)])
    expected = fresh(model, source, [*path, *path_to(6)]).logits[0, -1]
    close(score.logits[7], expected)


@pytest.mark.parametrize(("family", "attention"), models())
def test_branches_equal_paths_run_alone(family, attention):
    """Two branches that grow by turns, as beams and pools of drafts do."""
    model = load(family, attention)
    drafter, source = CachedModel(model), make_source(PROMPT, model)
    state = drafter.encode(source)
    drafter.catch_up(state, source.prefix)
    first, second = [*PROMPT], [*PROMPT]
    columns: dict[str, list[int]] = {"first": [0, 1, 2], "second": [0, 1, 2]}
    for pair in ([8, 9], [30, 30], [11, 7]):
        start = state.cached
        for name, place in (("first", start), ("second", start + 1)):
            columns[name].append(place)
        visible = torch.zeros(2, start + 2, dtype=torch.bool)
        visible[0, columns["first"]] = True
        visible[1, columns["second"]] = True
        positions = torch.full((2,), len(first))
        score = drafter.extend(state, torch.tensor(pair), visible, positions)
        first.append(pair[0])
        second.append(pair[1])
        for row, path in enumerate((first, second)):
            reference = fresh(model, source, path)
            close(score.logits[row], reference.logits[0, -1], precision_of(model))
            close(score.hidden[row], last_hidden(reference)[-1], precision_of(model))
    with pytest.raises(ValueError, match="6 columns of branches are cached"):
        drafter.catch_up(state, torch.tensor(PROMPT))
    with pytest.raises(ValueError, match="branches are cached"):
        drafter.feed(state, torch.tensor([5]))
    drafter.forget(state, len(PROMPT))
    score = drafter.catch_up(state, torch.tensor(first))
    close(score.logits[-1], fresh(model, source, first).logits[0, -1], precision_of(model))


def two_branches(drafter: CachedModel, source) -> SequenceState:
    """Behind the prompt's three columns, 8 30 in columns 3 and 5, 9 11 in columns 4 and 6."""
    state = drafter.encode(source)
    drafter.catch_up(state, torch.tensor(PROMPT))
    for pair in ([8, 9], [30, 11]):
        start, depth = state.cached, state.cached // 2
        visible = torch.zeros(2, start + 2, dtype=torch.bool)
        visible[:, :3] = True
        for row in (0, 1):
            visible[row, 3 + row :: 2] = True
        drafter.extend(state, torch.tensor(pair), visible, torch.tensor([depth + 2] * 2))
    return state


@pytest.mark.parametrize(
    ("columns", "path"), [([0, 1, 2, 4, 6], [9, 11]), ([0, 1, 2, 3], [8]), ([0, 1, 2], [])]
)
@pytest.mark.parametrize("family", ["qwen3", "opt"])
def test_the_columns_of_a_branch_can_be_kept_and_fed_again(family, columns, path):
    model = tiny_model(family)
    drafter, source = CachedModel(model), make_source(PROMPT, model)
    state = two_branches(drafter, source)
    drafter.keep_columns(state, columns)
    tokens = [*PROMPT, *path]
    assert (state.tokens, state.positions) == (tokens, list(range(len(tokens))))
    close_caches(state, fresh(model, source, tokens).past_key_values)
    tokens += [27, 12]
    score = drafter.catch_up(state, torch.tensor(tokens))
    assert score.hidden.shape[0] == 2  # what was kept is not fed again
    close(score.logits[-1], fresh(model, source, tokens).logits[0, -1])


def test_columns_that_are_first_are_kept_without_a_copy():
    model = tiny_model("llama")
    drafter = CachedModel(model)
    state = two_branches(drafter, make_source(PROMPT, model))
    before = state.cache.layers[0].keys.data_ptr()
    drafter.keep_columns(state, [0, 1, 2, 3])
    assert state.cache.layers[0].keys.data_ptr() == before
    drafter.keep_columns(state, [])
    assert state.cached == 0


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ([0, 1, 2, 7], "column 7 cannot be kept; 7 are cached"),
        ([0, 1, 2, -1], "column -1 cannot be kept"),
        ([0, 1, 2, 3, 4], r"positions \[0, 1, 2, 3, 3\], which are no path"),
        ([0, 2], r"positions \[0, 2\], which are no path"),
    ],
)
def test_columns_that_are_no_path_are_refused(columns, reason):
    model = tiny_model("llama")
    drafter = CachedModel(model)
    state = two_branches(drafter, make_source(PROMPT, model))
    with pytest.raises(ValueError, match=reason):
        drafter.keep_columns(state, columns)
    assert state.cached == 7


def test_masks_of_random_trees_hold_the_ancestors_only():
    generator = torch.Generator().manual_seed(0)
    for size in range(1, 9):
        parents = torch.tensor(
            [int(torch.randint(-1, node, (), generator=generator)) for node in range(size)]
        )
        assert torch.equal(ancestry(parents), slow_ancestry(parents))


def slow_ancestry(parents: Tensor) -> Tensor:
    lines = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        here = node
        while here >= 0:
            lines[node, here] = True
            here = int(parents[here])
    return lines


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_trees_are_refused_where_positions_cannot_be_given(family):
    model = tiny_model(family)
    target, source = CachedModel(model), make_source(PROMPT, model)
    state = target.encode(source)
    with pytest.raises(ValueError, match=f"'{family}' model .* cannot be given a draft tree"):
        target.score([state], [source.prefix], [Proposal(NODES, PARENTS)])
    with pytest.raises(ValueError, match=f"'{family}' model .* cannot be given a draft tree"):
        one = torch.tensor([5])
        target.extend(state, one, torch.ones(1, 1, dtype=torch.bool), torch.tensor([0]))
    assert not target.takes_branches
