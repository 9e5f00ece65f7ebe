"""Looked-up rows are the model's own, of chains and of greedy trees."""

from __future__ import annotations

import pytest
import torch

from drafttrain.decoding.types import Proposal
from drafttrain.evaluation.played.recorded_model import RecordedModel
from tests.evaluation.played.pairs import prompts_of, target_of

FAMILIES = ["llama", "marian"]


@pytest.mark.parametrize("family", FAMILIES)
def test_looked_up_rows_are_the_models_own(family):
    model, [prompt, *_] = target_of(family), prompts_of(family)
    recorded = RecordedModel(model)
    states = [model.encode(prompt.source), recorded.encode(prompt.source)]
    draft = Proposal.chain(torch.tensor([8, 30, 7]))
    longer = torch.cat((prompt.source.prefix, torch.tensor([8, 11])))
    for _ in range(2):  # computed, then looked up
        for own, state in ((model, states[0]), (recorded, states[1])):
            own.score([state], [prompt.source.prefix], [draft])
            own.keep(state, torch.tensor([0]))
        caught = [
            own.catch_up(state, longer)
            for own, state in zip((model, recorded), states, strict=True)
        ]
        fed = [
            own.feed(state, torch.tensor([9, 9]))
            for own, state in zip((model, recorded), states, strict=True)
        ]
        for ours, theirs in (caught, fed):
            torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-12)
            torch.testing.assert_close(ours.hidden[-1], theirs.hidden[-1], rtol=0, atol=1e-12)
    assert recorded.record.asked == 6 and recorded.record.made == 3


def test_rows_behind_a_rejected_token_are_not_computed():
    model, [prompt, *_] = target_of("llama"), prompts_of("llama")
    recorded = RecordedModel(model).skipping_rejected()
    state = recorded.encode(prompt.source)
    best = int(recorded.catch_up(state, prompt.source.prefix).logits[0].argmax())
    wrong = Proposal.chain(torch.tensor([(best + 1) % 40, 5, 6]))
    [score] = recorded.score([state], [prompt.source.prefix], [wrong])
    assert recorded.record.made == 1
    assert int(score.logits[0].argmax()) == best
    assert score.logits.shape[0] == 4 and not score.logits[1:].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_tree_are_those_of_its_greedy_path_alone(family):
    """A tree around the target's own tokens a, b: nodes a, x, b below a, y below x."""
    model, [prompt, *_] = target_of(family), prompts_of(family)
    recorded, prefix = RecordedModel(model, skip_rejected=True), prompt.source.prefix
    own, state = model.encode(prompt.source), recorded.encode(prompt.source)
    a = int(model.catch_up(own, prefix).logits[0].argmax())
    b = int(model.feed(own, torch.tensor([a])).logits[0].argmax())
    x = (a + 1) % 40
    draft = Proposal(torch.tensor([a, x, b, 5]), torch.tensor([-1, -1, 0, 1]))
    own = model.encode(prompt.source)
    [real] = model.score([own], [prefix], [draft])
    for _ in range(2):  # computed, then looked up
        [score] = recorded.score([state], [prefix], [draft])
        read = [0, 1, 3]  # the last committed token, a, b
        torch.testing.assert_close(score.logits[read], real.logits[read], rtol=0, atol=1e-12)
        assert not score.logits[2].any() and not score.logits[4].any()
    assert recorded.record.made == 1
    model.keep(own, torch.tensor([0, 2]))
    recorded.keep(state, torch.tensor([0, 2]))
    assert state.tokens == [*prefix.tolist(), a, b]
    longer = torch.cat((prefix, torch.tensor([a, b, 7])))
    ours, theirs = recorded.catch_up(state, longer), model.catch_up(own, longer)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=1e-12)


def test_trees_are_refused_where_all_rows_may_be_read():
    recorded, [prompt, *_] = RecordedModel(target_of("llama")), prompts_of("llama")
    tree = Proposal(torch.tensor([5, 6, 7]), torch.tensor([-1, -1, 0]))
    with pytest.raises(ValueError, match="draft chains"):
        recorded.score([recorded.encode(prompt.source)], [prompt.source.prefix], [tree])
