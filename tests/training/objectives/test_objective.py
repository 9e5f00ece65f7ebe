"""Every objective has the interface that the training loop needs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from drafttrain.config.recipes import (
    FollowInBlocksConfig,
    FollowTargetConfig,
    HeadConfig,
    ObjectiveConfig,
)
from drafttrain.data.batches.block_rows import BlockRowsCollator
from drafttrain.data.batches.examples import Example, PairCollator
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.hidden.states import HeadBatch
from drafttrain.training.objective import Batch, Objective
from drafttrain.training.objectives.follow_states import FollowStates
from drafttrain.training.objectives.follow_target import FollowTarget
from drafttrain.training.objectives.head_sweep import HeadSweep, make_heads
from drafttrain.training.objectives.language_modelling import LanguageModelling
from drafttrain.training.objectives.mask_predict import MaskPredict
from drafttrain.training.objectives.predict_ahead import PredictAhead
from tests.tiny_drafters import block_heads, collator, state_drafter, tiny_drafter
from tests.tiny_models import tiny_model

EXAMPLES = [Example(0, row, [5, 6 + row, 1], [7, 8, 9 + row, 1]) for row in range(3)]
BLOCKS = FollowInBlocksConfig(forward_kl=1.0)


def mask_predict() -> tuple[Objective, Batch]:
    drafter = tiny_drafter("marian")
    objective = MaskPredict(drafter, ObjectiveConfig())
    return objective, collator(drafter, 2)(EXAMPLES)


def predict_ahead() -> tuple[Objective, Batch]:
    heads = block_heads()
    batch = BlockRowsCollator(heads.config.heads, positions=4, seed=0)(EXAMPLES)
    return PredictAhead(heads, tiny_model("marian")), batch


def language_modelling(family: str) -> tuple[Objective, Batch]:
    collate = PairCollator(0, joined=family != "t5")
    objective = LanguageModelling(tiny_model(family), 0.1, tiny_model(family, seed=2))
    return objective, collate(EXAMPLES)


def follow_target(packed: bool) -> tuple[Objective, Batch]:
    drafter, draftable = tiny_model("llama", num_hidden_layers=1), torch.tensor([1, 7, 8, 30])
    settings = FollowTargetConfig(forward_kl=1.0, total_variation=0.2)
    objective = FollowTarget(drafter, settings, tiny_model("llama", seed=2), draftable)
    collate = BlocksCollator(0)
    return objective, collate([EXAMPLES]) if packed else collate.alone(EXAMPLES)


def follow_blocks() -> tuple[Objective, Batch]:
    objective = FollowTarget(tiny_model("llama", seed=2), BLOCKS, tiny_model("llama"))
    return objective, BlocksCollator(0, 0, 3)([EXAMPLES])


def follow_states() -> tuple[Objective, Batch]:
    target = tiny_model("llama", num_hidden_layers=4)
    drafter = state_drafter(target, [1, 3], "linked", k=3)
    collate = BlocksCollator(0, 0, 3, reads_prompt=False)
    return FollowStates(drafter, BLOCKS, target), collate.alone(EXAMPLES)


def head_sweep() -> tuple[Objective, Batch]:
    heads = make_heads(HeadConfig(depths=(0, 3, 1), rejection_weights=(1.0, 3.0)), 8, seed=0)
    return HeadSweep(heads), HeadBatch(torch.randn(5, 8), torch.rand(5))


OBJECTIVES = {
    "mask_predict": mask_predict,
    "predict_ahead": predict_ahead,
    "pairs": partial(language_modelling, "t5"),
    "texts": partial(language_modelling, "llama"),
    "follow_target": partial(follow_target, packed=True),
    "follow_unpacked": partial(follow_target, packed=False),
    "follow_blocks": follow_blocks,
    "follow_states": follow_states,
    "head_sweep": head_sweep,
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_maps_a_batch_to_sums_of_each_part(name: str) -> None:
    objective, batch = OBJECTIVES[name]()
    assert isinstance(objective, Objective)
    sums = objective.train()(batch.to(torch.device("cpu")), 0.5)
    shape = () if objective.parts is None else (len(objective.parts),)
    assert all(value.shape == shape and value.isfinite().all() for value in sums)
    assert (sums.weight > 0).all() and (sums.correct <= sums.counted).all()
    sums.loss.sum().backward()
    reached = [p.grad is not None for p in objective.model.parameters() if p.requires_grad]
    assert any(reached)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_its_model_alone_is_saved_and_no_teacher_is_trained(name: str) -> None:
    objective, _ = OBJECTIVES[name]()
    assert all(name.startswith("model.") for name in objective.state_dict())
    if objective.teacher is not None:
        frozen = list(objective.teacher.model.parameters())
        assert not {id(p) for p in frozen} & {id(p) for p in objective.parameters()}
        assert not any(p.requires_grad for p in frozen) and not objective.teacher.model.training
    if objective.parts is not None:
        of_parts = [id(p) for part in objective.parts.values() for p in part.parameters()]
        assert sorted(of_parts) == sorted(id(p) for p in objective.parameters())
