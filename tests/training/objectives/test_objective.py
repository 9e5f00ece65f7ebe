"""Every objective has the interface that the training loop needs."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from drafttrain.config.recipes import FollowTargetConfig, HeadConfig, ObjectiveConfig
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
from tests.comparing import close
from tests.tiny_drafters import block_heads, collator, state_drafter
from tests.tiny_models import tiny_model
from tests.training.tiny_runs import examples, slot_drafter

EXAMPLES = [Example(*example) for example in examples()]
BLOCKS = FollowTargetConfig(forward_kl=1.0)
Made = tuple[Objective, Callable[[Sequence[Example]], Batch]]
"""An objective without dropout, and what makes its batches."""


def mask_predict(blocks: int = 2, **changes: object) -> Made:
    objective = MaskPredict(slot_drafter(**changes), ObjectiveConfig())
    return objective, collator(objective.model, blocks)


def predict_ahead(positions: int = 4) -> Made:
    heads, still = block_heads(), tiny_model("marian", dropout=0.0)
    return PredictAhead(heads, still), BlockRowsCollator(heads.config.heads, positions, seed=0)


def language_modelling(family: str, **still: float) -> Made:
    objective = LanguageModelling(tiny_model(family, **still), 0.1, tiny_model(family, seed=2))
    return objective, PairCollator(0, joined=family != "t5")


def follow_target(packed: bool) -> Made:
    drafter, draftable = tiny_model("llama", num_hidden_layers=1), torch.tensor([1, 7, 8, 30])
    settings = FollowTargetConfig(forward_kl=1.0, total_variation=0.2)
    objective = FollowTarget(drafter, settings, tiny_model("llama", seed=2), draftable)
    collate = BlocksCollator(0)
    return objective, (lambda rows: collate([rows])) if packed else collate.alone


def follow_blocks() -> Made:
    objective = FollowTarget(tiny_model("llama", seed=2), BLOCKS, tiny_model("llama"))
    return objective, lambda rows: BlocksCollator(0, 0, 3)([rows])


def follow_states() -> Made:
    target = tiny_model("llama")
    drafter = state_drafter(target, [1], "linked", k=3)
    collate = BlocksCollator(0, 0, 3, reads_prompt=False)
    return FollowStates(drafter, BLOCKS, target), collate.alone


def head_sweep() -> Made:
    heads = make_heads(HeadConfig(depths=(0, 3, 1), rejection_weights=(1.0, 3.0)), 8, seed=0)

    def collate(rows: Sequence[Example]) -> HeadBatch:
        seeds = (torch.Generator().manual_seed(row.row) for row in rows)
        drawn = [torch.rand(8, 9, generator=seed, dtype=torch.float64) for seed in seeds]
        values = torch.cat(drawn)
        return HeadBatch(values[:, :8] - 0.5, values[:, 8])

    return HeadSweep(heads).double(), collate


OBJECTIVES = {
    "mask_predict": mask_predict,
    "predict_ahead": predict_ahead,
    "pairs": partial(language_modelling, "t5", dropout_rate=0.0, num_layers=1),
    "texts": partial(language_modelling, "llama"),
    "follow_target": partial(follow_target, packed=True),
    "follow_unpacked": partial(follow_target, packed=False),
    "follow_blocks": follow_blocks,
    "follow_states": follow_states,
    "head_sweep": head_sweep,
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_returns_sums_of_each_part_and_its_model_alone_is_saved_and_trained(name):
    objective, collate = OBJECTIVES[name]()
    assert isinstance(objective, Objective)
    sums = objective.train()(collate(EXAMPLES).to(torch.device("cpu")), 0.5)
    shape = () if objective.parts is None else (len(objective.parts),)
    assert all(value.shape == shape and value.isfinite().all() for value in sums)
    assert (sums.weight > 0).all() and (sums.correct <= sums.counted).all()
    sums.loss.sum().backward()
    reached = [p.grad is not None for p in objective.model.parameters() if p.requires_grad]
    assert any(reached)
    assert all(name.startswith("model.") for name in objective.state_dict())
    if objective.teacher is not None:
        frozen = list(objective.teacher.model.parameters())
        assert not {id(p) for p in frozen} & {id(p) for p in objective.parameters()}
        assert not any(p.requires_grad for p in frozen) and not objective.teacher.model.training
    if objective.parts is not None:
        of_parts = [id(p) for part in objective.parts.values() for p in part.parameters()]
        assert sorted(of_parts) == sorted(id(p) for p in objective.parameters())


VARIANTS: dict[str, Callable[[], Made]] = {
    "one slot": partial(mask_predict, k=1),
    "previous tokens": partial(mask_predict, previous_token_rank=4),
    "paper": partial(mask_predict, slots="paper"),
    "bidirectional": partial(mask_predict, 1, slots="paper", prefix_attention="bidirectional"),
    "one position": partial(predict_ahead, 1),
    "all positions": partial(predict_ahead, 100),
}


@pytest.mark.parametrize("name", [*OBJECTIVES, *VARIANTS])
def test_sums_do_not_depend_on_how_the_batch_is_split(name):
    objective, collate = (OBJECTIVES | VARIANTS)[name]()
    objective.train()
    whole = objective(collate(EXAMPLES), 0.3)
    assert (whole.weight > 0).all()
    for cuts in ([0, 5, 6], [0, 1, 3, 6]):
        parts = [EXAMPLES[start:end] for start, end in itertools.pairwise(cuts)]
        sums = [objective(collate(part), 0.3) for part in parts]
        for total, *apart in zip(whole, *sums, strict=True):
            close(sum(apart), total, 1e-9 if total.dtype == torch.float64 else 1e-6)
