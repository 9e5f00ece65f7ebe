"""Inference mode as a decorator."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """Runs the function in inference mode, entering it only if it is not active already.

    Entering takes longer than many operations of a round, and such functions call each other.
    """

    @functools.wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*arguments, **named)
        with torch.inference_mode():
            return function(*arguments, **named)

    return called
