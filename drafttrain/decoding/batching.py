"""Coroutine scheduler that batches model calls across sequences.

What a drafter does for one sequence is a generator. It yields a `BatchedCall` for each function
that costs no more for all sequences than for one (above all a model call), and continues with the
result. `run_batched` advances the generators of all sequences and merges their pending calls of the
same function into one. Every method is therefore written, read and proven for one sequence, and
runs in batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from drafttrain.decoding.inference import without_gradients
from drafttrain.decoding.types import NOT_FINITE, NotFinite

T = TypeVar("T")


@dataclass(frozen=True)
class BatchedCall:
    """One sequence's part in a call that is made for several."""

    function: Callable[[Sequence[Any]], Sequence[Any]]
    """From a list of arguments to the list of results, in the same order."""
    argument: Any


BatchedSteps = Generator[BatchedCall, Any, T]
"""Work that ends in a T and yields the calls that it needs on the way."""


@without_gradients
def run_batched(works: Sequence[BatchedSteps[T] | T]) -> list[T]:
    """The results of all works, which share their calls; work without calls is its own result."""
    results: list[Any] = list(works)
    waiting: list[tuple[int, BatchedCall]] = []
    for place, work in enumerate(works):
        if isinstance(work, Generator):
            _go_on(place, work, None, results, waiting)
    while waiting:
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for place, call in waiting:
            groups.setdefault(call.function, []).append((place, call.argument))
        waiting = []
        for function, group in groups.items():
            found = function([argument for _, argument in group])
            for (place, _), result in zip(group, found, strict=True):
                _go_on(place, works[place], result, results, waiting)
    return results


def as_steps(work: BatchedSteps[T] | T) -> BatchedSteps[T]:
    """A work as steps, for `yield from`, though it may have none."""
    return (yield from work) if isinstance(work, Generator) else work


def run_single(work: BatchedSteps[T] | T) -> T:
    """The result of one work."""
    return run_batched([work])[0]


def arg_max_of_each(scores: Sequence[Tensor]) -> list[list[int]]:
    """A drafter's likeliest token of every row, at one wait for the device. Shapes: [R, V] each.

    Raises NotFinite for a row whose maximum is no finite number.
    """
    if scores[0].device.type == "cpu":
        found = [_finite_arg_max(rows) for rows in scores]
        if any(NOT_FINITE in tokens for tokens in found):
            raise NotFinite.of_drafter()
        return found
    tokens = torch.cat(likeliest_of_each(scores)).tolist()
    if NOT_FINITE in tokens:
        raise NotFinite.of_drafter()
    ends = itertools.accumulate(len(rows) for rows in scores)
    return [tokens[end - len(rows) : end] for end, rows in zip(ends, scores, strict=True)]


def likeliest_of_each(scores: Sequence[Tensor]) -> list[Tensor]:
    """A drafter's likeliest token of every row, not waited for: `NOT_FINITE` on a device where
    there is none. Shapes: [R, V] -> [R] each."""
    if scores[0].device.type == "cpu":
        return [torch.tensor(tokens) for tokens in arg_max_of_each(scores)]
    top, best = torch.cat(list(scores)).max(dim=-1)
    best = torch.where(top.isfinite(), best, NOT_FINITE)
    return list(best.split([len(rows) for rows in scores]))


Judged = tuple[list[int], list[int]]
"""The likeliest token of every row that judges a draft, and the draft's own tokens."""


def judge_each(drafts: Sequence[tuple[Tensor, Tensor]]) -> list[Judged]:
    """The likeliest token of every row, `NOT_FINITE` where its maximum is no finite number, and the
    tokens of each draft, at one wait for the device. Shapes: rows [N + 1, V], tokens [N] each.

    Raises NotFinite for drafts with `NOT_FINITE`.
    """
    if drafts[0][0].device.type == "cpu":
        return [(_finite_arg_max(rows), tokens.tolist()) for rows, tokens in drafts]
    top, best = torch.cat([rows for rows, _ in drafts]).max(dim=-1)
    waiting = [tokens for _, tokens in drafts if tokens.device.type != "cpu"]
    values = iter(torch.cat([torch.where(top.isfinite(), best, NOT_FINITE), *waiting]).tolist())
    found = [list(itertools.islice(values, len(rows))) for rows, _ in drafts]
    known = [
        list(itertools.islice(values, len(tokens)))
        if tokens.device.type != "cpu"
        else tokens.tolist()
        for _, tokens in drafts
    ]
    if any(NOT_FINITE in tokens for tokens in known):
        raise NotFinite.of_drafter()
    return list(zip(found, known, strict=True))


def _finite_arg_max(rows: Tensor) -> list[int]:
    values = rows.detach().numpy()
    best = np.argmax(values, axis=-1)  # of the first NaN, where there is one
    top = np.take_along_axis(values, best[:, None], axis=-1)[:, 0]
    return np.where(np.isfinite(top), best, NOT_FINITE).tolist()


def _go_on(
    place: int, work: Any, result: Any, results: list, waiting: list[tuple[int, BatchedCall]]
) -> None:
    """Let a work go on with a result, up to its next call or its end."""
    try:
        waiting.append((place, work.send(result)))
    except StopIteration as end:
        results[place] = end.value
