"""The total-variation term: what sampling rejects, against the target's own rows."""

from __future__ import annotations

import pytest
import torch

from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.batches.slots import SlotBatch
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.training.losses import rejection_probability
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.tiny_drafters import collator, shared, tiny_drafter

OUTPUTS = [[5, 9, 7, 1], [8, 4, 6, 9, 3, 7, 1]]
"""No token twice in an output, so that a label tells its place."""


def objective(weight: float, **drafter: object) -> MaskPredict:
    settings = ObjectiveConfig(total_variation=weight, glancing_start=0.0, glancing_end=0.0)
    model = tiny_drafter("marian", dropout=0.0, **drafter)
    return MaskPredict(model, settings, shared("marian")).train()


def batch_for(of: MaskPredict) -> SlotBatch:
    examples = [(0, row, [4, 6, 5, 1][row:], output) for row, output in enumerate(OUTPUTS)]
    return collator(of.model, 1)(examples)


def hidden_of(of: MaskPredict, batch: SlotBatch) -> torch.Tensor:
    read = RowReader(of.model)
    return read(batch.layout.rows, read.encode(batch.input_ids, batch.attention_mask)).hidden


def test_rejection_probability_by_hand() -> None:
    """min of (.7 .2 .1) and (.5 .5 0) sums to .7; of equal rows to 1."""
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1]]))
    target_probs = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.7, 0.2]])
    rejected = rejection_probability(logits, torch.tensor([[0, 1, 2], [2, 0, 1]]), target_probs)
    assert rejected.tolist() == pytest.approx([0.3, 0.0], abs=1e-6)


def test_tokens_that_are_not_among_the_likeliest_count_as_rejected() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    likeliest, target_probs = torch.tensor([[2, 0]]), torch.tensor([[0.6, 0.3]])
    rejected = rejection_probability(logits, likeliest, target_probs)
    assert rejected.item() == pytest.approx(1 - 0.25 - 0.3)


@pytest.mark.parametrize("slots", ["anchored", "paper"])
def test_each_row_is_compared_with_the_target_at_the_place_that_it_predicts(slots: str) -> None:
    ours = objective(1.0, slots=slots)
    batch = batch_for(ours)
    labels = batch.layout.labels
    counted = labels >= 0
    target, found = (
        shared("marian"),
        zip(*ours._target_rows(batch, counted.flatten().nonzero()[:, 0]), strict=True),
    )
    for sentence, output in enumerate(OUTPUTS):
        source = batch.input_ids[sentence : sentence + 1, : 4 - sentence]
        fed = torch.tensor([[ours.model.config.decoder_start_token_id, *output[:-1]]])
        with torch.no_grad():
            expected = target(input_ids=source, decoder_input_ids=fed).logits[0].softmax(-1)
        for label in labels[sentence][counted[sentence]].tolist():
            likeliest, probs = next(found)
            wanted = expected[output.index(label)]
            assert torch.equal(likeliest, wanted.topk(len(likeliest)).indices)
            assert torch.allclose(probs.double(), wanted[likeliest], atol=1e-6)


def test_drafter_that_is_its_target_is_rejected_at_no_row_of_the_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "drafttrain.training.objectives.mask_predict.LIKELIEST", 10**6
    )  # all tokens
    ours = objective(1.0, decoder_layers=len(shared("marian").get_decoder().layers))
    batch = batch_for(ours)
    prefix = (batch.layout.rows.block == -1) & (batch.layout.labels >= 0)
    hidden = hidden_of(ours, batch)[prefix]
    rejected = rejection_probability(
        ours.model.project(hidden), *ours._target_rows(batch, prefix.flatten().nonzero()[:, 0])
    )
    assert rejected.max() < 1e-5


def test_term_is_added_with_the_weights_of_the_rows() -> None:
    without, with_term = objective(0.0), objective(0.5)
    batch = batch_for(without)
    plain, sums = without(batch, 0.0), with_term(batch, 0.0)
    weights = without._weights(batch.layout.labels, batch.layout)
    counted = weights > 0
    hidden = hidden_of(without, batch)[counted]
    rejected = rejection_probability(
        without.model.project(hidden),
        *with_term._target_rows(batch, counted.flatten().nonzero()[:, 0]),
    )
    expected = plain.loss + 0.5 * (rejected * weights[counted]).sum()
    assert sums.loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert sums.weight == plain.weight
    with_term.eval()
    assert with_term(batch, 0.0).loss.item() == pytest.approx(plain.loss.item())  # not validation
