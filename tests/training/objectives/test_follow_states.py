"""The objective of state drafters: the loss of every slot, computed by hand."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.config.recipes import FollowTargetConfig
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.models.state_drafter import read_target
from drafttrain.training.objectives.follow_states import FollowStates
from tests.comparing import close
from tests.tiny_drafters import state_drafter
from tests.tiny_models import EOS, tiny_model
from tests.training.tiny_runs import learn, numbered

ROWS = [([5, 6, 7], [8, 9, 14, EOS]), ([10], [11, 12, 20, 9, EOS]), ([4, 4], [13, EOS])]
EXAMPLES = numbered(ROWS)
K = 3
COLLATE = BlocksCollator(pad_token_id=0, mask_token=0, k=K, reads_prompt=False)
DRAFTABLE = torch.tensor([EOS, 8, 9, 12, 14, 30])


def objective_of(mode: str, draftable=None, **settings: object) -> FollowStates:
    target = tiny_model("llama", num_hidden_layers=4)
    drafter = state_drafter(target, [1, 3], mode, k=K).train()
    return FollowStates(drafter, FollowTargetConfig(**settings), target, draftable).train()


@pytest.mark.parametrize(("mode", "draftable"), [("blocks", None), ("linked", DRAFTABLE)])
def test_the_loss_equals_that_of_single_slots(mode, draftable):
    objective = objective_of(mode, draftable, forward_kl=2.0)
    model, target = objective.model, objective.teacher.model
    wanted = torch.arange(40) if draftable is None else draftable
    embed, output = target.get_input_embeddings(), target.get_output_embeddings().weight[wanted]
    loss, count = torch.zeros((), dtype=torch.float64), 0
    for source, answer in ROWS:
        text = torch.tensor([source + answer])
        for anchor in range(len(source), text.shape[1] - 1):
            reading = read_target(target, model.config, text[:, :anchor])
            of_anchors = model.anchor_inputs(reading.states[:, -1])
            for slot in range(min(K, text.shape[1] - 1 - anchor)):
                depths = torch.arange(slot + 1)
                previous = embed(text[0, [anchor] * (slot + 1)])
                inputs = model.slot_inputs(of_anchors.expand(slot + 1, -1, -1), previous, depths)
                mask = torch.zeros(slot + 1, anchor + slot + 1, dtype=torch.double)
                mask = mask.masked_fill(~torch.ones_like(mask).bool().tril(anchor), -1e9)
                given = (inputs[None], anchor + depths[None], mask[None, None], reading.keys_values)
                hidden = model(*given)[0, -1]
                if mode == "linked" and slot > 0:
                    previous = model.previous_token
                    before = embed(text[0, anchor + slot])
                    features = previous.embedding(before / before.square().mean().sqrt())
                    hidden = hidden + previous.out(F.silu(previous.hidden(hidden) + features))
                own = F.linear(hidden, output).log_softmax(-1)
                place = anchor + slot + 1
                rows = target(text[:, :place]).logits[0, -1].log_softmax(-1)[wanted].detach()
                loss = loss + 2 * (rows.exp() * (rows - own)).sum()
                count += 1
    sums = objective(COLLATE.alone(EXAMPLES), 0.0)
    assert float(sums.weight) == count
    close(sums.loss, loss, 1e-6)
    trained = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(one, trained) for one in (sums.loss, loss))
    for one, two in zip(ours, theirs, strict=True):
        close(one, two, 1e-6)


@pytest.mark.parametrize("mode", ["blocks", "linked"])
def test_packed_rows_have_the_loss_of_single_rows(mode):
    objective = objective_of(mode, forward_kl=0.5, total_variation=1.0)
    one, two = EXAMPLES[:2], EXAMPLES[2:]
    packed, alone = objective(COLLATE([one, two]), 0.0), objective(COLLATE.alone(EXAMPLES), 0.0)
    close(packed.loss, alone.loss, 1e-6)
    assert float(packed.weight) == float(alone.weight) > 0


def test_it_learns_one_batch():
    objective = objective_of("linked", forward_kl=1.0)
    losses = learn(objective, COLLATE.alone(EXAMPLES), steps=60, rate=4e-2)
    assert losses[-1] < 0.02 * losses[0]
