"""The mask-predict objective: no loss on revealed slots, learning."""

import math

import pytest
import torch

from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.batches.examples import PairCollator
from drafttrain.data.batches.slots import SlotBatch
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.models.spec_drafter.layout import PADDING
from drafttrain.training.losses import smoothed_cross_entropy
from drafttrain.training.objectives.language_modelling import LanguageModelling
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.comparing import close
from tests.tiny_drafters import collator, drafter_of, shared, tiny_drafter
from tests.tiny_models import tiny_model, tiny_t5gemma
from tests.training.tiny_runs import examples, learn, slot_drafter


@pytest.mark.parametrize("family", ["marian", "bart", "t5", "t5gemma"])
def test_a_separate_prefix_pass_equals_one_pass_over_all_rows(family):
    target = tiny_t5gemma() if family == "t5gemma" else shared(family)
    drafter = drafter_of(target)
    batch = collator(drafter, 2)(examples())
    rows, start = batch.layout.rows, batch.layout.prefix_rows
    read = RowReader(drafter)
    encoded = read.encode(batch.input_ids, batch.attention_mask)
    whole = read(rows, encoded).hidden
    prefix = read(rows.part(0, start), encoded, keep=True)
    apart = torch.cat((prefix.hidden, read(rows.part(start), encoded, prefix).hidden), dim=1)
    real = rows.block != PADDING
    assert (whole - apart)[real].abs().max() < (1e-12 if family in ("marian", "bart") else 1e-5)


def test_blocks_past_the_last_position_are_read():
    """An output may end at the last position; its last blocks then have slots without labels."""
    drafter = tiny_drafter("bart")
    limit = drafter.config.max_position_embeddings
    batch = collator(drafter, limit)([(0, 0, [5, 6, 1], [*[7] * (limit - 1), 1])])
    assert batch.layout.rows.positions.max() >= limit
    assert MaskPredict(drafter, ObjectiveConfig())(batch, 0.0).loss.isfinite()


def objective_and_batch(**changes) -> tuple[MaskPredict, SlotBatch]:
    objective = MaskPredict(slot_drafter(**changes), ObjectiveConfig())
    return objective, collator(objective.model, 1)(examples())


CHOICE = "drafttrain.training.objectives.mask_predict.choose_revealed"


def test_both_glancing_passes_drop_out_the_same_units(monkeypatch):
    objective, batch = objective_and_batch(dropout=0.4)
    seen = []
    objective.model.get_decoder().register_forward_hook(
        lambda module, given, named, output: seen.append((named["input_ids"], output[0].detach())),
        with_kwargs=True,
    )
    monkeypatch.setattr(CHOICE, lambda wrong, revealable, *_: torch.zeros_like(revealable))
    objective.train()(batch, 0.5)
    (_, prefix), (first_tokens, first), (second_tokens, second) = seen
    assert prefix.shape[1] == 9  # the longest output; computed once for both passes
    assert torch.equal(first_tokens, second_tokens)
    close(first, second)


def test_revealed_slots_leave_the_loss_and_validation_reveals_none(monkeypatch):
    objective, batch = objective_and_batch(slots="paper")
    monkeypatch.setattr(CHOICE, lambda wrong, revealable, *_: revealable)
    sums = objective.train()(batch, 0.5)
    assert sums.weight == 0 and sums.loss == 0
    sums.loss.backward()  # an empty selection keeps its graph
    assert objective.eval()(batch, 0.0).weight == (batch.layout.labels >= 0).sum()


def test_prefix_rows_have_the_set_weight_and_slots_weight_1():
    settings = ObjectiveConfig(prefix_weight=0.25)
    objective = MaskPredict(slot_drafter(), settings).eval()
    batch = collator(objective.model, 1)([(0, 0, [5, 1], [4, 5, 6, 7, 8, 1])])
    weights = objective._weights(batch.layout.labels, batch.layout)[0]
    assert weights[:6].tolist() == [0.25] * 6
    prefix = int(batch.layout.of_blocks(batch.layout.rows.limit)[0, 0, 0])
    inside = min(3, 5 - prefix)  # masks that predict y_{p+2}.. up to EOS
    assert weights[6:].tolist() == [1.0] * inside + [0.0] * (3 - inside)


@pytest.mark.parametrize("changes", [{}, {"previous_token_rank": 8}, {"slots": "paper"}], ids=str)
def test_one_batch_is_learned_by_heart(changes):
    objective = MaskPredict(slot_drafter(**changes), ObjectiveConfig(label_smoothing=0.0)).train()
    batch = collator(objective.model, 2)(examples(3))
    learn(objective, batch, steps=80, rate=1e-2)
    sums = objective.eval()(batch, 1.0)
    assert sums.loss / sums.weight < 0.05
    assert sums.correct == sums.counted


def test_smoothed_loss_by_hand():
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64))
    weight = torch.tensor([2.0], dtype=torch.float64)
    loss, total = smoothed_cross_entropy(logits, torch.tensor([0]), weight, 0.3)
    expected = 0.7 * -math.log(0.7) + 0.1 * sum(-math.log(p) for p in (0.7, 0.2, 0.1))
    assert loss.item() == pytest.approx(2 * expected)
    assert total.item() == 2.0


FAMILIES = {"marian": PairCollator(0), "llama": PairCollator(0, joined=True)}
ROWS = [(0, 0, [5, 6, 1], [7, 8, 9, 1]), (0, 1, [5, 1], [7, 1])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_is_its_teacher_is_always_accepted_and_has_no_loss(family):
    batch = FAMILIES[family](ROWS)
    still = {} if family == "llama" else {"dropout": 0.0}
    objective = LanguageModelling(tiny_model(family, **still), teacher=tiny_model(family))
    counted = 6 if family == "marian" else 9  # decoder-only: also the prompt except its first token
    torch.testing.assert_close(objective.acceptance(batch), torch.ones(counted))
    sums = objective.train()(batch, 0.0)
    assert sums.loss.item() == pytest.approx(0.0, abs=1e-5) and sums.weight == counted
    assert objective.eval()(batch, 0.0).loss.item() > 1.0  # uses the references


def test_ids_that_only_one_vocabulary_has_are_left_out():
    model, teacher = tiny_model("llama", vocab_size=40), tiny_model("llama", vocab_size=48)
    batch = FAMILIES["llama"](ROWS)
    objective = LanguageModelling(model, teacher=teacher).train()
    target, draft = (
        one(batch.input_ids).logits.float().log_softmax(-1)[0, 2:5, :40] for one in (teacher, model)
    )
    rows = objective.log_probs(batch, objective._read(model, batch)[0])
    for found, expected in zip(rows, (target, draft), strict=True):
        torch.testing.assert_close(found[2:5], expected)
    assert objective(batch, 0.0).loss.isfinite()
