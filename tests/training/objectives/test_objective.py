"""Every objective is what the one loop asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafttrain.config.recipes import FollowTargetConfig, HeadConfig, ObjectiveConfig
from drafttrain.data.batches.block_rows import BlockRowsCollator
from drafttrain.data.batches.examples import Example, PairCollator, TextCollator
from drafttrain.data.batches.packing import DocumentCollator
from drafttrain.data.hidden.states import HeadBatch
from drafttrain.training.objective import Batch, Objective
from drafttrain.training.objectives.follow_target import FollowTarget
from drafttrain.training.objectives.head_sweep import HeadSweep, make_heads
from drafttrain.training.objectives.language_modelling import LanguageModelling
from drafttrain.training.objectives.mask_predict import MaskPredict
from drafttrain.training.objectives.predict_ahead import PredictAhead
from tests.tiny_drafters import block_heads, collator, tiny_drafter
from tests.tiny_models import tiny_model

EXAMPLES = [Example(0, row, [5, 6 + row, 1], [7, 8, 9 + row, 1]) for row in range(3)]


def mask_predict() -> tuple[Objective, Batch]:
    drafter = tiny_drafter("marian")
    objective = MaskPredict(drafter, ObjectiveConfig(), tiny_model("marian"))
    return objective, collator(drafter, 2)(EXAMPLES)


def predict_ahead() -> tuple[Objective, Batch]:
    heads = block_heads()
    batch = BlockRowsCollator(heads.config.heads, positions=4, seed=0)(EXAMPLES)
    return PredictAhead(heads, tiny_model("marian")), batch


def sequence_to_sequence() -> tuple[Objective, Batch]:
    objective = LanguageModelling(tiny_model("marian"), teacher=tiny_model("marian", seed=2))
    return objective, PairCollator(pad_token_id=0)(EXAMPLES)


def next_token() -> tuple[Objective, Batch]:
    return LanguageModelling(tiny_model("llama")), TextCollator(pad_token_id=0)(EXAMPLES)


def follow_target() -> tuple[Objective, Batch]:
    objective = FollowTarget(tiny_model("llama"), FollowTargetConfig(), tiny_model("llama", seed=2))
    return objective, DocumentCollator(pad_token_id=0)([EXAMPLES])


def head_sweep() -> tuple[Objective, Batch]:
    heads = make_heads(HeadConfig(depths=(0, 1), rejection_weights=(1.0, 3.0)), 8, seed=0)
    return HeadSweep(heads), HeadBatch(torch.randn(5, 8), torch.rand(5))


OBJECTIVES = [
    mask_predict,
    predict_ahead,
    sequence_to_sequence,
    next_token,
    follow_target,
    head_sweep,
]


@pytest.mark.parametrize("make", OBJECTIVES, ids=lambda make: make.__name__)
def test_an_objective_maps_a_batch_to_sums_of_each_part(
    make: Callable[[], tuple[Objective, Batch]],
) -> None:
    objective, batch = make()
    assert isinstance(objective, Objective)
    sums = objective.train()(batch.to(torch.device("cpu")), 0.5)
    shape = () if objective.parts is None else (len(objective.parts),)
    assert all(value.shape == shape and value.isfinite().all() for value in sums)
    assert (sums.weight > 0).all() and (sums.correct <= sums.counted).all()
    sums.loss.sum().backward()
    reached = [p.grad is not None for p in objective.model.parameters() if p.requires_grad]
    assert any(reached)


@pytest.mark.parametrize("make", OBJECTIVES, ids=lambda make: make.__name__)
def test_its_model_alone_is_saved_and_no_teacher_is_trained(
    make: Callable[[], tuple[Objective, Batch]],
) -> None:
    objective, _ = make()
    assert all(name.startswith("model.") for name in objective.state_dict())
    if objective.teacher is not None:
        frozen = list(objective.teacher.model.parameters())
        assert not {id(p) for p in frozen} & {id(p) for p in objective.parameters()}
        assert not any(p.requires_grad for p in frozen) and not objective.teacher.model.training
    if objective.parts is not None:
        of_parts = [id(p) for part in objective.parts.values() for p in part.parameters()]
        assert sorted(of_parts) == sorted(id(p) for p in objective.parameters())
