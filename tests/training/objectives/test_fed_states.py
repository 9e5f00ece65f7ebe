"""Spec-Drafters that are fed the target's states: which ones training feeds, and with what."""

from __future__ import annotations

import pytest
import torch

from drafttrain.config.recipes import DrafterConfig, ObjectiveConfig
from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.slots import SlotCollator
from drafttrain.decoding.drafters.block_along import block_states
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.teacher_forcing import states_before
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.tiny_drafters import fed_states, shared
from tests.tiny_models import EOS

ROWS = [([5, 9, 7, EOS], [8, 4, 6, EOS], []), ([4, EOS], [9, 3, 7, 5, 6, EOS], [11, 12])]
"""Sources, outputs, and what decoding starts from."""
SHAPES = {
    "own encoder": {},
    "own slots": {"slot_weights": "own", "previous_token_rank": 3},
    "first fed": {"slot_attention": "causal", "feeds_first": True},
}


def objective(family: str = "marian", **shape: object) -> MaskPredict:
    target = shared(family)
    drafter = fed_states(target, family, decoder_layers=2, dropout=0.0, **shape)
    return MaskPredict(drafter.model, ObjectiveConfig(label_smoothing=0.0), target).train()


def examples() -> list[Example]:
    return [Example(0, row, *own) for row, own in enumerate(ROWS)]


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_each_token_has_the_state_that_it_was_predicted_from(family: str) -> None:
    ours = objective(family)
    batch = SlotCollator(ours.model.config, 1, seed=0)(examples())
    found = ours.target_states(batch)
    assert found.shape == (2, 8, ours.model.config.state_width)
    for line, (source, output, given) in zip(found, ROWS, strict=True):
        target = ours.teacher.model
        [before] = states_before(target, [make_source(source, target, given)], [output])
        first = 1 + len(given)
        assert line[:first].count_nonzero() == 0
        assert (line[first : first + len(output) - 1] - before[:-1]).abs().max() < 1e-12


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_training_reads_a_prefix_as_drafting_along_an_output_does(shape: dict) -> None:
    ours = objective(**shape).eval()
    batch = SlotCollator(ours.model.config, 1, seed=0)(examples())
    layout, model = batch.layout, ours.model
    rows = layout.rows.part(0, layout.prefix_rows)
    memory = model.encode(batch.source, batch.attention_mask)
    read = model.read(rows, memory, states=ours.target_states(batch)).hidden
    unfed = model.read(rows, memory).hidden
    for line, (source, output, given) in enumerate(ROWS):
        target = ours.teacher.model
        [before] = states_before(target, [make_source(source, target, given)], [output])
        ids, places = torch.tensor(output), range(len(output))
        expected, _ = block_states(
            model, torch.tensor(source), ids, places, 1, given, before=before
        )
        own = slice(len(given), len(given) + len(output))
        assert (read[line, own] - expected[:, 0]).abs().max() < 1e-12
        assert (unfed[line, own][1:] - expected[1:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_sums_do_not_depend_on_the_batch_and_states_are_learned_from(shape: dict) -> None:
    ours = objective(**shape)
    collate = SlotCollator(ours.model.config, 2, seed=0)
    whole = ours(collate(examples()), 0.3)
    parts = [ours(collate([example]), 0.3) for example in examples()]
    for total, *apart in zip(whole, *parts, strict=True):
        assert abs(total - sum(apart)) < 1e-9
    whole.loss.backward()
    assert ours.model.of_state.weight.grad.abs().max() > 0


def test_a_drafter_starts_as_if_no_state_were_fed() -> None:
    """Its map of them is zero, so that the target's weights start as they would without."""
    ours = objective()
    fresh = SpecDrafter(ours.model.config)
    assert fresh.of_state.weight.count_nonzero() == 0


def test_the_target_is_asked_for() -> None:
    with pytest.raises(ValueError, match="fed the target's states; give the target"):
        MaskPredict(objective().model, ObjectiveConfig())


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ({"slots": "paper"}, "drafter.target_states=false"),
        ({"soft_copy": True}, "drafter.soft_copy=false"),
    ],
)
def test_what_does_not_go_with_states_is_named(shape: dict, remedy: str) -> None:
    settings = DrafterConfig(target_states=True, **shape)
    with pytest.raises(ValueError, match=remedy):
        fed_states(shared("marian"), **settings.model_dump(exclude={"target_states"}))
