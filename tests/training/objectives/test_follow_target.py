"""The objective of causal and parallel drafters: sums by hand, packed rows, a draft vocabulary."""

import pytest
import torch
from transformers import PreTrainedModel

from drafttrain.config.recipes import FollowTargetConfig
from drafttrain.data.batches.examples import Example, TopRows
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


def answer_rows(model: PreTrainedModel, example: Example) -> torch.Tensor:
    """Returns log-probabilities [T, V] of a single row at the tokens of its output."""
    ids = torch.tensor([example.source_ids + example.target_ids[:-1]])
    with torch.no_grad():
        return model(ids).logits[0, len(example.source_ids) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
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


def test_tokens_outside_the_draft_vocabulary_have_no_index():
    objective = objective_of(EVERY, draftable=DRAFTABLE)
    labels = torch.tensor([11, 9, EOS, 20])
    assert objective.draftable_index(labels).tolist() == [IGNORED, 2, 0, IGNORED]
    assert objective.tokens(torch.tensor([4, 0])).tolist() == [30, EOS]


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_validation_is_the_cross_entropy_of_the_tokens_that_can_be_drafted(draftable):
    objective = objective_of(EVERY, draftable=draftable).eval()
    sums = objective(COLLATE.alone(EXAMPLES), 1.0)
    wanted = list(range(40)) if draftable is None else draftable.tolist()
    known, expected = 0, torch.zeros((), dtype=torch.float64)
    for example in EXAMPLES:
        own = answer_rows(objective.model, example)[:, wanted].log_softmax(-1)
        for row, token in enumerate(example.target_ids):
            if token in wanted:
                known, expected = known + 1, expected - own[row, wanted.index(token)]
    close(sums.loss, expected)
    assert (sums.weight, sums.counted) == (known, 8)


@pytest.mark.parametrize("collate", [COLLATE, IN_BLOCKS], ids=["one token", "blocks"])
@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_the_loss_equals_that_of_single_blocks(draftable, collate):
    settings = FollowTargetConfig(forward_kl=2.0, total_variation=0.5)
    objective, k = objective_of(settings, draftable=draftable), 3 if collate is IN_BLOCKS else 1
    batch = collate([EXAMPLES])
    sums = objective(batch, 0.0)
    wanted = list(range(40)) if draftable is None else draftable.tolist()
    loss, acceptance, correct = torch.zeros((), dtype=torch.float64), [], 0
    for source, output in ROWS:
        for place in range(len(output)):
            for slot, token in enumerate(output[place : place + k]):
                ids = torch.tensor([source + output[:place] + [MASK] * slot])
                with torch.no_grad():
                    own = objective.model(ids).logits[0, -1, wanted].log_softmax(-1)
                    known = torch.tensor([source + output[: place + slot]])
                    theirs = objective.teacher.model(known).logits[0, -1].log_softmax(-1)[wanted]
                acceptance.append(torch.minimum(theirs.exp(), own.exp()).sum())
                loss += 2 * (theirs.exp() * (theirs - own)).sum() + 0.5 * (1 - acceptance[-1])
                correct += wanted[int(own.argmax())] == token
    close(sums.loss, loss, 1e-10 if k == 1 else 1e-6)  # weights of blocks are float32
    assert (sums.weight, sums.correct, sums.counted) == (len(acceptance), correct, len(acceptance))
    close(objective.overlap(batch, objective.rows(batch)[0]).sum(), torch.stack(acceptance).sum())


@pytest.mark.parametrize("draftable", [None, DRAFTABLE], ids=["all", "few"])
def test_rows_that_are_known_teach_every_token_of_every_block_as_the_target_does(draftable):
    objective = objective_of(EVERY, draftable=draftable)
    known, teacher, rows = [], objective.teacher.model, EXAMPLES[:2]
    for example in rows:
        forced = teacher_force(teacher, [example.source_ids], [example.target_ids])[0]
        known.append(example._replace(target_rows=top_rows(forced.logits, 40, draftable)))
    close(
        objective(IN_BLOCKS([known]), 0.0).loss,
        objective(IN_BLOCKS([EXAMPLES[:2]]), 0.0).loss,
        1e-9,
    )
    two = [one._replace(target_rows=TopRows(*(part[:, :2] for part in one.target_rows)))
           for one in known]  # fmt: skip
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
