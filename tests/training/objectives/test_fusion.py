"""Spec-Drafters that fuse the target's hidden states: which ones, and how the map is fitted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import ObjectiveConfig
from drafttrain.data.batches.examples import Example
from drafttrain.decoding.drafters.teacher_forced_blocks import block_states
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.decoding.engine.teacher_forcing import states_before
from drafttrain.models.least_squares import RIDGE
from drafttrain.models.spec_drafter.fusion import KnownOutputs, fit_fusion
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.training.objectives.mask_predict import MaskPredict
from tests.tiny_drafters import collator, fused_states, shared, tiny_drafter
from tests.tiny_models import EOS

ROWS = [([5, 9, 7, EOS], [8, 4, 6, EOS], []), ([4, EOS], [9, 3, 7, 5, 6, EOS], [11, 12])]
"""Sources, outputs, and what decoding starts from."""
SHAPES = {
    "own encoder": {},
    "causal slots": {"slot_attention": "causal", "previous_token_rank": 3},
}


def objective(family: str = "marian", **shape: object) -> MaskPredict:
    target = shared(family)
    drafter = fused_states(target, family, decoder_layers=2, dropout=0.0, **shape)
    return MaskPredict(drafter.model, ObjectiveConfig(label_smoothing=0.0), target).train()


def examples() -> list[Example]:
    return [Example(0, row, *own) for row, own in enumerate(ROWS)]


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_each_token_has_the_state_that_it_was_predicted_from(family: str) -> None:
    ours = objective(family)
    batch = collator(ours.model, 1)(examples())
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
    batch = collator(ours.model, 1)(examples())
    layout, model = batch.layout, ours.model
    rows = layout.rows.part(0, layout.prefix_rows)
    reader, states = RowReader(model), ours.target_states(batch)
    encoded = reader.encode(batch.source, batch.attention_mask)
    read = reader(rows, encoded, states=states).hidden
    untold = reader(rows, encoded, states=torch.zeros_like(states)).hidden
    for line, (source, output, given) in enumerate(ROWS):
        target = ours.teacher.model
        [before] = states_before(target, [make_source(source, target, given)], [output])
        ids = torch.tensor(output)
        expected, _ = block_states(model, torch.tensor(source), ids, given, before)
        own = slice(len(given), len(given) + len(output))
        assert (read[line, own] - expected[:, 0]).abs().max() < 1e-12
        assert (untold[line, own][1:] - expected[1:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_sums_do_not_depend_on_the_batch_and_states_are_learned_from(shape: dict) -> None:
    ours = objective(**shape)
    batches = collator(ours.model, 2)
    whole = ours(batches(examples()), 0.3)
    parts = [ours(batches([example]), 0.3) for example in examples()]
    for total, *apart in zip(whole, *parts, strict=True):
        assert abs(total - sum(apart)) < 1e-9
    whole.loss.backward()
    assert ours.model.fusion.of_state.weight.grad.abs().max() > 0


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_the_map_is_fitted_to_what_the_target_hands_the_copied_layer(family: str) -> None:
    """Of squared errors and a share of squared weights the least: the gradient is zero."""
    target = shared(family)
    drafter = tiny_drafter(family, decoder_layers=1, target_states=True)
    config, inputs, wanted = drafter.config, [], []
    layer = drafter.shape.fused_layer
    assert layer == 1  # the last of two
    for source, output, given in ROWS:
        tokens = torch.tensor([[config.decoder_start_token_id, *given, *output[:-1]]])
        read = target(
            input_ids=torch.tensor([source]), decoder_input_ids=tokens, output_hidden_states=True
        ).decoder_hidden_states
        scale = getattr(target.get_decoder(), "embed_scale", 1.0)  # Marian's, after embedding
        for place in range(tokens.shape[1]):
            state = read[-1][0, place - 1] if place > len(given) else torch.zeros(16)
            embedded = target.get_decoder().embed_tokens(tokens)[0, place]
            if place > len(given):  # as long as the token's own embedding
                state = state * (embedded.square().mean() / state.square().mean()).sqrt()
            inputs.append(torch.cat((state.double(), embedded, torch.ones(1))))
            wanted.append((read[layer][0, place] - read[0][0, place]) / scale)
    fit_fusion(drafter, target, known_outputs(drafter))
    fusion = drafter.fusion
    parts = fusion.of_state.weight, fusion.of_token.weight, fusion.of_token.bias[:, None]
    weights, inputs, wanted = torch.cat(parts, 1).T, torch.stack(inputs), torch.stack(wanted)
    products = inputs.T @ inputs
    ridge = RIDGE * products.diagonal().mean() * weights
    gradient = products @ weights + ridge - inputs.T @ wanted
    assert gradient.abs().max() < 1e-3 * (inputs.T @ wanted).abs().max()


def known_outputs(drafter: SpecDrafter) -> Iterator[KnownOutputs]:
    """Both rows in one batch."""
    batch = collator(drafter, 1)(examples())
    start = torch.full((2, 1), drafter.config.decoder_start_token_id)
    tokens = torch.cat((start, batch.targets[:, :-1]), 1)
    lengths = torch.tensor([len(output) + len(given) for _, output, given in ROWS])
    yield KnownOutputs(batch.source, batch.attention_mask, tokens, lengths, batch.given)


def test_slots_that_do_not_go_with_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="drafter.target_states=false"):
        tiny_drafter("marian", target_states=True, slots="paper")
