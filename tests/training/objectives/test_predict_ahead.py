"""The objective of block heads: correct labels, learning."""

import pytest
import torch

from drafttrain.data.batches.block_rows import BlockRowsCollator
from drafttrain.decoding.drafters.block_heads import predict_blocks
from drafttrain.decoding.engine.teacher_forcing import teacher_force
from drafttrain.training.objectives.predict_ahead import PredictAhead
from tests.tiny_drafters import block_heads
from tests.tiny_models import PAD, tiny_model
from tests.training.tiny_runs import examples, learn


@pytest.mark.parametrize("family", ["marian", "t5", "llama"])
def test_loss_is_the_cross_entropy_of_each_heads_token(family):
    heads, rows = block_heads(), examples()
    whole = BlockRowsCollator(heads.config.heads, positions=100, seed=0)
    target, expected, counted = tiny_model(family), 0.0, 0
    sums = PredictAhead(heads, target)(whole(rows), 0.0)
    for _, _, source, output in rows:
        before = teacher_force(target, [source], [output])[0].before.clone()
        for j in range(1, heads.config.k):
            for i in range(len(output) - j):  # output[i] is y_{i + 1}
                inner = (before[i] @ heads.inner_weight[j - 1] + heads.inner_bias[j - 1]).relu()
                state = before[i] + inner @ heads.outer_weight[j - 1] + heads.outer_bias[j - 1]
                if family == "t5":
                    state = state * 16**-0.5
                logits = target.lm_head(state)
                if family == "marian":
                    logits = logits + target.final_logits_bias
                expected -= logits.log_softmax(-1).flatten()[output[i + j]].item()
                counted += 1
    assert sums.weight == counted == sums.counted
    assert abs(sums.loss.item() - expected) < 1e-8 * expected


def test_an_output_may_take_all_positions_of_the_target():
    target, output = tiny_model("marian", max_position_embeddings=8), [*range(4, 11), 1]
    heads, before = block_heads(), {"decoder_input_ids": torch.tensor([[PAD, *output[:-1]]])}
    batch = BlockRowsCollator(3, 100, seed=0)([(0, 0, [5, 1], output)])
    wanted = target(torch.tensor([[5, 1]]), **before, output_hidden_states=True)
    expected = wanted.decoder_hidden_states[-1][0, batch.rows]
    torch.testing.assert_close(PredictAhead(heads, target).states(batch), expected)
    assert len(predict_blocks(heads, target, torch.tensor([5, 1]), torch.tensor(output))) == 8


def test_positions_are_drawn_anew_each_epoch_and_again_for_the_same_one():
    collate, output = BlockRowsCollator(3, 4, seed=0), [5, 6, 7, 8, 9, 10, 11, 12, 13, 1]
    keys = [(0, 3), (0, 3), (1, 3), (0, 4)]
    one, same, *others = (collate([(*key, [5, 1], output)]).rows.tolist() for key in keys)
    assert one == same and one not in others


def test_head_j_learns_from_a_jth_of_the_positions_and_never_past_the_end():
    collate = BlockRowsCollator(4, 4, seed=0)
    batch = collate([(0, 0, [5, 1], [10, 11, 12, 13, 14, 1]), (0, 1, [6, 1], [20, 1])])
    assert batch.counts == (5, 2, 2, 1)  # the second output has one only for head 1
    tokens = torch.tensor([10, 11, 12, 13, 14, 1, 20, 1])
    ahead = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(batch.counts))
    assert torch.equal(batch.labels, tokens[batch.rows + ahead])
    of_first = batch.rows < 6
    assert (batch.rows + ahead)[of_first].max() < 6
    one = collate([(0, 0, [5, 1], [1])])
    assert one.counts == (0, 0, 0, 0)


def test_heads_learn_one_batch_by_heart():
    trained = PredictAhead(block_heads(std=None, ffn_size=64), tiny_model("marian")).train()
    batch = BlockRowsCollator(3, 100, seed=0)(examples())
    losses = learn(trained, batch, steps=50, rate=0.05)
    sums = trained(batch, 0.0)
    assert losses[-1] < 0.05 and sums.correct == sums.counted
