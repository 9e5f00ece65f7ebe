"""Checks of recipes before anything is written."""

import pytest

from drafttrain.config.base import ConfigError
from drafttrain.training.recipe import check_apart


def test_held_out_inputs_of_the_training_are_counted_and_refused_above_a_half():
    training = {"a", "b"}
    assert check_apart("train.txt", training, "held_out", ["a", "c", "b", "d"]) == 2
    assert check_apart("train.txt", set(), "data", ["a"]) == 0
    with pytest.raises(ConfigError, match=r"2 of 3 inputs of held_out .*held_out.skip"):
        check_apart("train.txt", training, "held_out", ["a", "c", "b"])
