"""On-policy learning: what is drafted is taught, by hand; off-policy where the share is 0."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from drafttrain.build.continuing import build_continuation
from drafttrain.config.language_recipes import CausalDrafterRecipe, FollowTargetConfig
from drafttrain.data.batches.drafted import (
    BegunRow,
    DraftedRound,
    OnPolicyBatch,
    OnPolicyCollator,
    lay_out_drafts,
    lay_out_rounds,
)
from drafttrain.data.batches.packing import DocumentCollator
from drafttrain.models.spec_drafter.slots import IGNORED
from drafttrain.training.objectives.follow_drafts import FollowDrafts
from drafttrain.training.objectives.follow_target import FollowTarget
from tests.comparing import close
from tests.tiny_models import EOS, tiny_model
from tests.training.objectives.test_follow_target import DRAFTABLE, EVERY, examples

COLLATE = DocumentCollator(pad_token_id=0)
KL = FollowTargetConfig(forward_kl=1.0)
ROUNDS = [DraftedRound([8, 9, 10], 1, [8, 11]), DraftedRound([12, 13], 2, [12, 13, 14])]


def recipe(**settings: object) -> CausalDrafterRecipe:
    values = {"run": "run", "target": {"path": "t"}, "data": {"path": "d"}, "on_policy": settings}
    return CausalDrafterRecipe.model_validate(values)


def objective_of(draftable: Tensor | None = None, settings=KL, **on_policy) -> FollowDrafts:
    drafter, target = tiny_model("llama", seed=5, num_hidden_layers=1), tiny_model("llama")
    continue_rows = build_continuation(recipe(**on_policy), target, draftable)
    return FollowDrafts(drafter, settings, target, continue_rows, draftable).train()


def begun_rows() -> tuple[BegunRow, ...]:
    return tuple(BegunRow(0, e.row, e.source_ids + e.target_ids[:1]) for e in examples()[:2])


def rounds_of(objective: FollowDrafts, begun: Sequence[BegunRow]) -> list[list[DraftedRound]]:
    """The rounds that the objective plays behind these rows."""
    rounds = objective.continue_rows(objective.model.eval(), begun)
    objective.model.train()
    return rounds


def prefixes(tokens: Sequence[int], rounds: Sequence[DraftedRound]) -> list[list[int]]:
    """Every text that the drafter was asked to go on from."""
    found, text = [], list(tokens)
    for one in rounds:
        found += [text + one.drafted[:place] for place in range(len(one.drafted))]
        text += one.emitted
    return found


def test_where_drafts_stand_by_hand() -> None:
    laid = lay_out_rounds([5, 6, 7], ROUNDS)
    none = [IGNORED, IGNORED]
    assert laid == {
        "ids": [5, 6, 7, 8, 11, 12, 13, 9],
        "positions": [0, 1, 2, 3, 4, 5, 6, 4],
        "labels": [*none, 8, 9, 12, 13, IGNORED, 10],
        "anchors": [-1] * 7 + [3],
    }


def test_nothing_is_learned_behind_an_end() -> None:
    laid = lay_out_rounds([5], [DraftedRound([8, EOS, 9], 3, [8, EOS])])
    assert (laid["ids"], laid["labels"]) == ([5, 8], [8, EOS])


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_positions_taught_are_the_drafted_prefixes(draftable, temperature: float) -> None:
    objective = objective_of(draftable, temperature=temperature, draft=3, new_tokens=9)
    begun = begun_rows()
    rounds = rounds_of(objective, begun)
    asked = [p for row, own in zip(begun, rounds, strict=True) for p in prefixes(row.tokens, own)]
    assert any(one.accepted + 1 < len(one.drafted) for own in rounds for one in own)
    expected = torch.zeros((), dtype=torch.float64)
    for prefix in asked:
        with torch.no_grad():
            own = objective.model(torch.tensor([prefix])).logits[0, -1]
            theirs = objective.teacher.model(torch.tensor([prefix])).logits[0, -1].log_softmax(-1)
        wanted = slice(None) if draftable is None else draftable
        own, theirs = own[wanted].log_softmax(-1), theirs[wanted]
        expected += (theirs.exp() * (theirs - own)).sum()
    sums = objective(OnPolicyBatch(None, begun), 0.0)
    close(sums.loss, expected, 1e-9)
    assert (sums.weight, sums.correct, sums.counted) == (len(asked), 0, 0)
    assert objective.model.training and not objective.teacher.model.training


class Bigrams(PreTrainedModel):
    """A language model whose row depends on the last token alone: a table of logits."""

    config_class = PretrainedConfig

    def __init__(self, table: Tensor) -> None:
        super().__init__(PretrainedConfig(vocab_size=len(table)))
        self.table = nn.Parameter(table)

    def forward(self, input_ids: Tensor, **inputs: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def test_gradients_are_those_by_hand_on_a_tiny_vocabulary() -> None:
    """By the logits of a row: q - p, once for every drafted prefix that ends in its token."""
    draft_table = torch.tensor([[0.0, 1, 2], [1, 0, 1], [2, 2, 0]]).double()
    target_table = torch.tensor([[1.0, 0, 0], [0, 2, 0], [0, 1, 1]]).double()
    rounds = [[DraftedRound([1, 2, 2], 1, [1, 0]), DraftedRound([2], 1, [2, 1])]]
    drafter, target = Bigrams(draft_table.clone()), Bigrams(target_table)
    objective = FollowDrafts(drafter, KL, target, lambda model, begun: rounds).train()
    sums = objective(OnPolicyBatch(None, (BegunRow(0, 0, [0]),)), 0.0)
    sums.loss.backward()
    asked = [0, 1, 2, 0]  # 0 | 0 1 | 0 1 2 (rejected), then 0 1 0
    slope = draft_table.softmax(-1) - target_table.softmax(-1)
    expected = torch.stack([asked.count(token) * slope[token] for token in range(3)])
    close(drafter.table.grad, expected)
    assert target.table.grad is None and sums.weight == 4


def test_share_0_is_off_policy() -> None:
    plain = FollowTarget(tiny_model("llama", seed=5), EVERY, tiny_model("llama")).train()
    other = FollowDrafts(tiny_model("llama", seed=5), EVERY, tiny_model("llama"), None).train()
    one = plain(COLLATE([examples()]), 0.0)
    two = other(OnPolicyCollator(COLLATE, 0.0)([examples()]), 0.0)
    for theirs, ours in zip(one, two, strict=True):
        close(ours, theirs)
    one.loss.backward()
    two.loss.backward()
    for theirs, ours in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        close(ours.grad, theirs.grad)


def test_rows_learned_as_they_are_and_continued_ones_add_up() -> None:
    objective = objective_of(settings=EVERY, draft=2, new_tokens=6)
    batch = OnPolicyBatch(COLLATE([examples()[:1]]), begun_rows()[1:])
    apart = [objective(OnPolicyBatch(batch.whole, ()), 0.0)]
    apart.append(objective(OnPolicyBatch(None, batch.begun), 0.0))
    for found, *parts in zip(objective(batch, 0.0), *apart, strict=True):
        close(found.double(), sum(parts).double())


def test_the_share_of_rows_that_are_cut_and_their_places_follow_from_the_row_alone() -> None:
    rows = [e._replace(epoch=epoch, row=row) for epoch in range(4) for row in range(200)
            for e in examples()[:1]]  # fmt: skip
    collate = OnPolicyCollator(COLLATE, 0.3, seed=7)
    batch = collate([[one] for one in rows])
    assert 0.25 < len(batch.begun) / len(rows) < 0.35
    assert len(batch.begun) + len(batch.whole.input_ids) == len(rows)
    places = [len(one.tokens) - len(rows[0].source_ids) for one in batch.begun]
    assert set(places) == {0, 1, 2}  # of three tokens; the whole row would leave nothing to draft
    again = collate([rows[::-1]]).begun
    assert sorted(again) == sorted(batch.begun)
    of_epochs = [{one.row for one in batch.begun if one.epoch == epoch} for epoch in (0, 1)]
    assert of_epochs[0] != of_epochs[1]


def test_what_a_row_is_continued_by_does_not_depend_on_its_neighbours() -> None:
    objective = objective_of(draft=3, new_tokens=8)
    first, second = begun_rows()
    together = rounds_of(objective, [first, second])
    assert together[1] == rounds_of(objective, [second])[0]
    others = [second._replace(epoch=epoch) for epoch in range(1, 6)]
    drawn = rounds_of(objective, others)
    assert any(own != together[1] for own in drawn)


def test_a_row_without_drafts_has_a_loss_of_0_with_a_graph() -> None:
    objective = objective_of()
    objective.continue_rows = lambda model, begun: [[DraftedRound([], 0, [EOS])] for _ in begun]
    sums = objective(OnPolicyBatch(None, begun_rows()), 0.0)
    sums.loss.backward()
    assert sums.loss == 0 and sums.weight == 0


def test_padding_changes_nothing() -> None:
    objective = objective_of(draft=3, new_tokens=8)
    begun = begun_rows()
    rounds = rounds_of(objective, begun)
    together = objective.on_drafts(lay_out_drafts(begun, rounds))
    apart = [
        objective.on_drafts(lay_out_drafts([row], [own]))
        for row, own in zip(begun, rounds, strict=True)
    ]
    close(together.loss, apart[0].loss + apart[1].loss, 1e-9)
