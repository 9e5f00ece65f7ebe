"""Computing without gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def without_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """The function in inference mode, which is entered only where it is not on already.

    Entering takes longer than many an operation of a round, in which such functions call others.
    """

    @functools.wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            return function(*arguments, **named)
        with torch.inference_mode():
            return function(*arguments, **named)

    return called
