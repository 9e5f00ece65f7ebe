"""The objective of parallel drafters: the loss of every token of every block, computed by hand."""

from __future__ import annotations

import pytest
import torch

from drafttrain.config.recipes import FollowTargetConfig
from drafttrain.data.batches.examples import TopRows
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.teacher import top_rows
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.training.objectives.follow_target import FollowTarget
from tests.comparing import close
from tests.tiny_models import EOS, tiny_model
from tests.training.tiny_runs import numbered

MASK = 3
ROWS = [([5, 6, 7], [8, 9, EOS]), ([10], [11, 12, 20, EOS])]
EXAMPLES = numbered(ROWS)
COLLATE = BlocksCollator(pad_token_id=0, mask_token=MASK, k=3)
DRAFTABLE = torch.tensor([EOS, 8, 9, 12, 30])
"""Draft vocabulary, without 11 and 20."""


def objective_of(draftable=None, **settings: object) -> FollowTarget:
    drafter = tiny_model("llama", seed=5, num_hidden_layers=1)
    wanted = FollowTargetConfig(**settings)
    return FollowTarget(drafter, wanted, tiny_model("llama"), draftable).train()


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_the_loss_equals_that_of_single_blocks(draftable) -> None:
    objective = objective_of(draftable, forward_kl=2.0)
    batch = COLLATE([EXAMPLES])
    sums = objective(batch, 0.0)
    wanted = range(40) if draftable is None else draftable.tolist()
    loss = weights = acceptance = torch.zeros((), dtype=torch.float64)
    for source, output in ROWS:
        for place in range(len(output)):
            context = source + output[:place]
            for slot in range(len(output[place : place + 3])):
                ids = torch.tensor([context + [MASK] * slot])
                with torch.no_grad():
                    own = objective.model(ids).logits[0, -1, wanted].log_softmax(-1)
                    known = torch.tensor([source + output[: place + slot]])
                    theirs = objective.teacher.model(known).logits[0, -1].log_softmax(-1)[wanted]
                loss = loss + 2 * (theirs.exp() * (theirs - own)).sum()
                weights = weights + 1
                acceptance = acceptance + torch.minimum(theirs.exp(), own.exp()).sum()
    close(sums.loss, loss, 1e-6)  # weights are float32
    close(sums.weight.double(), weights, 1e-6)
    assert sums.counted == 3 + 2 + 1 + 4 + 3 + 2  # blocks end with their output
    close(objective.overlap(batch, objective.rows(batch)[0]).sum(), acceptance)


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_rows_that_are_known_teach_every_token_of_every_block_as_the_target_does(draftable) -> None:
    objective = objective_of(draftable, forward_kl=1.0, total_variation=1.0)
    known, teacher = [], objective.teacher.model
    for example in EXAMPLES:
        forced = teacher_force(teacher, [example.source_ids], [example.target_ids])[0]
        known.append(example._replace(target_rows=top_rows(forced.logits, 40, draftable)))
    close(objective(COLLATE([known]), 0.0).loss, objective(COLLATE([EXAMPLES]), 0.0).loss, 1e-9)
    two = [one._replace(target_rows=TopRows(*(part[:, :2] for part in one.target_rows)))
           for one in known]  # fmt: skip
    likeliest, _ = objective.compared_rows(COLLATE([two]), objective.rows(COLLATE([two]))[0])
    online = objective.target_log_probs(COLLATE([EXAMPLES]))
    close(likeliest, online.topk(2).values)
