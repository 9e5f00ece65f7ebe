"""What a shallow decoder learns from: hand-made sums of the loss, rows as in decoding."""

from __future__ import annotations

import pytest
import torch

from drafttrain.data.batches.examples import Example
from drafttrain.data.batches.heard import HeardBatch, HeardCollator
from drafttrain.models.shallow_decoder import freeze
from drafttrain.models.spec_drafter.slots import IGNORED
from drafttrain.training.objectives.follow_decoder import FollowDecoder
from tests.comparing import close
from tests.tiny_models import EOS, NO_TIMESTAMPS, START, tiny_model
from tests.tiny_speech import shallow

OUTPUTS = [[11, 12, 13, EOS], [21, EOS]]
GIVEN = [5, 8, NO_TIMESTAMPS]


@pytest.fixture
def target():
    return tiny_model("whisper", decoder_layers=3)


def examples(target) -> list[Example]:
    torch.manual_seed(0)
    shape = (target.config.max_source_positions, target.config.d_model)
    return [
        Example(0, row, [], output, GIVEN, torch.randn(shape).half())
        for row, output in enumerate(OUTPUTS)
    ]


def batch_of(target) -> HeardBatch:
    return HeardCollator(START)(examples(target))


def test_the_decoder_is_fed_what_stands_before_each_label(target):
    batch = batch_of(target)
    assert batch.input_ids.tolist() == [
        [START, *GIVEN, 11, 12, 13],
        [START, *GIVEN, 21, START, START],
    ]
    nothing = [IGNORED] * 3
    assert batch.labels.tolist() == [[*nothing, *OUTPUTS[0]], [*nothing, 21, EOS, IGNORED, IGNORED]]
    assert batch.encoded.shape == (2, 12, 16) and batch.encoded.dtype == torch.float16


def test_the_loss_is_cross_entropy_and_the_weighted_divergence_from_the_target(target):
    drafter, batch = shallow(target, 2), batch_of(target)
    objective = FollowDecoder(drafter, target, target_weight=0.5).train()
    sums = objective(batch, 0.0)
    never = target.generation_config.suppress_tokens
    expected = torch.zeros((), dtype=torch.float64)
    for example in examples(target):
        fed = torch.tensor([[START, *GIVEN, *example.target_ids[:-1]]])
        encoded = (example.encoded[None].double(),)
        own = drafter(fed, encoder_outputs=encoded).logits[0, 3:].log_softmax(-1)
        theirs = target(encoder_outputs=encoded, decoder_input_ids=fed).logits[0, 3:]
        theirs[:, never] = -torch.inf
        labels = torch.tensor(example.target_ids)
        expected = expected - own[range(len(labels)), labels].sum()
        expected = expected - 0.5 * (theirs.softmax(-1) * own).sum()
    close(sums.loss, expected, 1e-5)  # the target's rows are float32
    assert float(sums.weight) == 6 == int(sums.counted)


def test_validation_asks_no_target(target):
    drafter, batch = shallow(target, 2), batch_of(target)
    taught = FollowDecoder(drafter, target, target_weight=0.5).eval()(batch, 0.0)
    alone = FollowDecoder(drafter).train()(batch, 0.0)
    close(taught.loss, alone.loss, 1e-12)


def test_the_targets_own_decoder_is_a_minimum_of_the_divergence(target):
    target.generation_config.suppress_tokens = None
    objective = FollowDecoder(shallow(target, 3), target, target_weight=1.0).train()
    batch = batch_of(target)
    for with_target in (True, False):
        if not with_target:
            objective.teacher = None
        objective(batch, 0.0).loss.backward()
        if with_target:
            whole = {n: p.grad.clone() for n, p in objective.model.named_parameters()}
            objective.zero_grad()
    for name, parameter in objective.model.named_parameters():
        close(whole[name], parameter.grad, 1e-4)  # the divergence adds nothing


def test_frozen_parts_get_no_gradient(target):
    drafter = shallow(target, 2)
    freeze(drafter, ["embeddings", "positions"])
    FollowDecoder(drafter).train()(batch_of(target), 0.0).loss.backward()
    frozen = {name for name, p in drafter.named_parameters() if p.grad is None}
    assert frozen == {
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
        "proj_out.weight",
    }
    freeze(drafter, ["cross-keys-values"])
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    assert len(frozen) == 2 * 3 and all("encoder_attn" in name for name in frozen)  # no key bias
    freeze(drafter, [])
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_it_learns_one_batch_by_heart(target):
    drafter, batch = shallow(target, 1), batch_of(target)
    objective = FollowDecoder(drafter).train()
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        sums = objective(batch, 0.0)
        sums.loss.backward()
        optimizer.step()
    assert float((sums.loss / sums.weight).detach()) < 0.05 and int(sums.correct) == 6


def test_rows_without_the_encoders_output_are_refused(target):
    with pytest.raises(ValueError, match="come without what it put out"):
        HeardCollator(START)([Example(0, 0, [], [11, EOS], GIVEN)])
    torch.manual_seed(0)
    uneven = [Example(0, row, [], [11, EOS], GIVEN, torch.randn(6 + row, 16)) for row in (0, 1)]
    with pytest.raises(ValueError, match="differ in length"):
        HeardCollator(START)(uneven)
