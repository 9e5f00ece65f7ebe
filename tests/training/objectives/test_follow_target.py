"""The objective of causal and parallel drafters: sums by hand, packed rows, a draft vocabulary."""

import pytest
import torch

from drafttrain.config.recipes import FollowTargetConfig
from drafttrain.data.batches.examples import TopRows
from drafttrain.data.batches.masked_blocks import BlocksCollator
from drafttrain.data.teacher import top_rows
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.models.spec_drafter.layout import IGNORED
from drafttrain.training.objectives.follow_target import FollowTarget, text_rows
from tests.comparing import close
from tests.tiny_families import any_family
from tests.tiny_models import CAUSAL_FAMILIES, EOS, tiny_model
from tests.training.tiny_runs import numbered

ROWS = [([5, 6, 7], [8, 9, EOS]), ([10], [11, 12, 20, EOS]), ([12, 13], [EOS])]
EXAMPLES = numbered(ROWS)
MASK = 3
COLLATE = BlocksCollator(pad_token_id=0)
IN_BLOCKS = BlocksCollator(pad_token_id=0, mask_token=MASK, k=3)
DRAFTABLE = torch.tensor([EOS, 8, 9, 12, 30])
"""Draft vocabulary, without 11 and 20."""
EVERY = FollowTargetConfig(forward_kl=1.0, total_variation=0.2)


def objective_of(
    settings: FollowTargetConfig, family: str = "llama", draftable: torch.Tensor | None = None
) -> FollowTarget:
    drafter = tiny_model(family, seed=5, num_hidden_layers=1)
    objective = FollowTarget(drafter, settings, tiny_model(family), draftable).train()
    objective.model.eval()  # some families have dropout
    return objective


@pytest.mark.parametrize(
    ("family", "draftable"), [("llama", DRAFTABLE), *((family, None) for family in CAUSAL_FAMILIES)]
)
def test_packed_rows_have_the_loss_and_the_gradients_of_rows_apart(family, draftable):
    apart, packed = (objective_of(EVERY, family, draftable) for _ in range(2))
    one = apart(COLLATE.alone(EXAMPLES), 0.0)
    two = packed(COLLATE([EXAMPLES[::-1]]), 0.0)
    for a, b in zip(one, two, strict=True):
        close(a, b, 1e-6)
    one.loss.backward()
    two.loss.backward()
    for a, b in zip(apart.model.parameters(), packed.model.parameters(), strict=True):
        if a.grad is not None:
            close(a.grad, b.grad, 1e-6)


@pytest.mark.parametrize("collate", [COLLATE, IN_BLOCKS], ids=["one token", "blocks"])
@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_the_loss_and_that_of_validation_are_those_of_single_blocks(draftable, collate):
    """In validation the loss is the cross entropy of the tokens that can be drafted."""
    settings = FollowTargetConfig(forward_kl=2.0, total_variation=0.5)
    objective, k = objective_of(settings, draftable=draftable), 3 if collate is IN_BLOCKS else 1
    batch = collate([EXAMPLES])
    sums = objective(batch, 0.0)
    wanted = list(range(40)) if draftable is None else draftable.tolist()
    loss, acceptance, known, correct = torch.zeros((), dtype=torch.float64), [], [], 0
    for source, output in ROWS:
        for place in range(len(output)):
            for slot, token in enumerate(output[place : place + k]):
                ids = torch.tensor([source + output[:place] + [MASK] * slot])
                with torch.no_grad():
                    own = objective.model(ids).logits[0, -1, wanted].log_softmax(-1)
                    ids = torch.tensor([source + output[: place + slot]])
                    theirs = objective.teacher.model(ids).logits[0, -1].log_softmax(-1)[wanted]
                acceptance.append(torch.minimum(theirs.exp(), own.exp()).sum())
                loss += 2 * (theirs.exp() * (theirs - own)).sum() + 0.5 * (1 - acceptance[-1])
                correct += wanted[int(own.argmax())] == token
                known += [own[wanted.index(token)]] if token in wanted else []
    close(sums.loss, loss, 1e-10 if k == 1 else 1e-6)  # weights of blocks are float32
    assert (sums.weight, sums.correct, sums.counted) == (len(acceptance), correct, len(acceptance))
    close(objective.overlap(batch, objective.rows(batch)[0]).sum(), torch.stack(acceptance).sum())
    held_out = objective.eval()(batch, 1.0)
    close(held_out.loss, -torch.stack(known).sum(), 1e-10 if k == 1 else 1e-6)
    assert (held_out.weight, held_out.counted) == (len(known), len(acceptance))
    indices = objective.draftable_index(torch.tensor([11, 9, EOS, 20]))
    assert indices.tolist() == ([11, 9, 1, 20] if draftable is None else [IGNORED, 2, 0, IGNORED])
    assert objective.tokens(torch.tensor([4, 0])).tolist() == [wanted[4], wanted[0]]


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_rows_that_are_known_teach_every_token_of_every_block_as_the_target_does(draftable):
    objective = objective_of(EVERY, draftable=draftable)
    known, teacher, rows = [], objective.teacher.model, EXAMPLES[:2]
    for example in rows:
        forced = teacher_force(teacher, [example.source_ids], [example.target_ids])[0]
        known.append(example._replace(target_rows=top_rows(forced.logits, 40, draftable)))
    online = objective(IN_BLOCKS([rows]), 0.0).loss
    close(objective(IN_BLOCKS([known]), 0.0).loss, online, 1e-9)
    cut = [TopRows(*(part[:, :2] for part in one.target_rows)) for one in known]
    two = [row._replace(target_rows=top) for row, top in zip(rows, cut, strict=True)]
    likeliest, _ = objective.compared_rows(IN_BLOCKS([two]), objective.rows(IN_BLOCKS([two]))[0])
    online = objective.target_log_probs(IN_BLOCKS([rows]))
    close(likeliest, online.topk(2).values)


PACKED = [
    ([5, 9, 20, 7], [11, 30, 12, 8, 25, 1]),
    ([9, 20, 7, 30, 11, 6], [30, 12, 8, 25, 1]),
    ([21], [12, 8, 1]),
    ([8, 15], [1]),
]


@pytest.mark.parametrize("family", ["Gemma3Text", "Mistral", "Cohere"])
def test_logits_of_packed_texts_equal_single_texts(family):
    """With windows of 5 tokens in some or all layers, and with scaled logits."""
    model, wanted = any_family(family), torch.tensor([4, 8, 30])
    examples = numbered(PACKED)
    batch = BlocksCollator(0)([examples[:2], examples[2:]])
    with torch.no_grad():
        packed, some = text_rows(model, batch), text_rows(model, batch, wanted)
        apart = [
            model(torch.tensor([source + target])).logits[0, len(source) - 1 : -1]
            for source, target in PACKED
        ]
    close(packed, torch.cat(apart), 1e-9)
    close(some, packed[:, wanted], 1e-9)
