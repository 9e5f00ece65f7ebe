"""Initialisation of state drafters: hand-computed least squares, and the target's layers."""

import torch

from drafttrain.models.state_drafter import (
    LeastSquares,
    StateDrafter,
    copy_layers,
    fit_start,
    make_config,
    normalised,
    read_target,
)
from tests.comparing import close
from tests.tiny_drafters import draw
from tests.tiny_models import tiny_model


def test_least_squares_recover_a_linear_map():
    torch.manual_seed(0)
    weights, constant, sums = torch.randn(3, 5), torch.randn(3), LeastSquares(5, 3)
    for inputs in torch.randn(101, 5).split((40, 1, 60)):
        sums.add(inputs, inputs @ weights.T + constant)
    found, own = sums.solve(1e-9)
    assert sums.count == 101
    assert (found - weights).abs().max() < 1e-4 and (own - constant).abs().max() < 1e-4


def test_a_ridge_by_hand():
    """One input 2 with output 6: products [[4, 2], [2, 1]], whose mean diagonal is 2.5."""
    sums = LeastSquares(1, 1)
    sums.add(torch.tensor([[2.0]]), torch.tensor([[6.0]]))
    weight, constant = sums.solve(0.4)  # 1 is added to the diagonal: 5 w + 2 c = 12, 2 w + 2 c = 6
    close(weight, torch.tensor([[2.0]]), 1e-5)
    close(constant, torch.tensor([1.0]), 1e-5)


def test_layers_are_the_targets_and_normalised_states_have_no_scale():
    target = tiny_model("llama", num_hidden_layers=4)
    drafter = StateDrafter(make_config(target.config, (1, 3), (0, -1), k=3)).double()
    copy_layers(drafter, target)
    own, theirs = drafter.decoder.state_dict(), target.model.state_dict()
    assert torch.equal(own["layers.1.mlp.up_proj.weight"], theirs["layers.3.mlp.up_proj.weight"])
    assert torch.equal(own["layers.0.mlp.up_proj.weight"], theirs["layers.1.mlp.up_proj.weight"])
    assert torch.equal(own["norm.weight"], theirs["norm.weight"])
    states = torch.randn(2, 7, dtype=torch.double)
    close(normalised(3 * states), normalised(states), 1e-6)


def test_slot_inputs_are_fitted_to_the_inputs_of_the_targets_layer():
    """On the texts of the fit, inputs are closer to the target's than the mean is: the first slot
    much, as it knows the token; the second a little, as random tokens cannot be predicted."""
    target = tiny_model("llama", num_hidden_layers=4)
    drafter = StateDrafter(make_config(target.config, (2, 3), (0, 1, -1), k=3)).double()
    copy_layers(drafter, target)
    torch.manual_seed(1)
    texts = [(draw(3, 40), draw(20, 40)) for _ in range(40)]
    assert fit_start(drafter, target, texts) == 40 * 19
    ids = torch.tensor([[*prompt, *output[:-1]] for prompt, output in texts])
    reading = read_target(target, drafter.config, ids)
    of_anchors = drafter.anchor_inputs(reading.states[:, 2:21].flatten(0, 1))
    embedded = target.get_input_embeddings()(ids[:, 3:]).flatten(0, 1)
    for depth, share in ((0, 0.5), (1, 1.0)):
        depths = torch.full((len(embedded),), depth)
        own = drafter.slot_inputs(of_anchors, embedded, depths).unflatten(0, (40, 19))
        theirs = reading.layer_inputs[:, 3 + depth :].flatten(0, 1)
        missed = own[:, : 19 - depth].flatten(0, 1) - theirs
        assert missed.square().sum() < share * (theirs - theirs.mean(0)).square().sum()
