"""Coroutine scheduler that batches model calls across sequences.

Drafting for one sequence is a generator. It yields a `BatchedCall` for each function that costs
about as much for one sequence as for all of them (mainly model calls), and receives the result.
`run_batched` advances the generators of all sequences and merges their pending calls of the same
function into one call. A method is therefore written, read and proven for one sequence, and still
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
    """One sequence's share of a call that is batched across sequences."""

    function: Callable[[Sequence[Any]], Sequence[Any]]
    """Maps the list of arguments, one per sequence, to the list of results in the same order."""
    argument: Any
    """This sequence's argument."""


BatchedSteps = Generator[BatchedCall, Any, T]
"""A generator that yields its batched calls and returns a T."""


@without_gradients
def run_batched(tasks: Sequence[BatchedSteps[T] | T]) -> list[T]:
    """Runs all tasks to their end, batching their calls, and returns their results in order.

    A task that is no generator needs no calls and is its own result.
    """
    results: list[Any] = list(tasks)
    pending: list[tuple[int, BatchedCall]] = []
    for index, task in enumerate(tasks):
        if isinstance(task, Generator):
            _advance(index, task, None, results, pending)
    while pending:
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for index, call in pending:
            groups.setdefault(call.function, []).append((index, call.argument))
        pending = []
        for function, group in groups.items():
            returned = function([argument for _, argument in group])
            for (index, _), result in zip(group, returned, strict=True):
                _advance(index, tasks[index], result, results, pending)
    return results


def as_steps(task: BatchedSteps[T] | T) -> BatchedSteps[T]:
    """Wraps a task that may be a plain result, so that `yield from` works for both."""
    return (yield from task) if isinstance(task, Generator) else task


def run_single(task: BatchedSteps[T] | T) -> T:
    """Runs one task and returns its result."""
    return run_batched([task])[0]


def arg_max_of_each(scores: Sequence[Tensor]) -> list[list[int]]:
    """Returns the drafter's most likely token of every row, with one device synchronisation.

    Shapes: [R, V] each -> R tokens each. Raises NotFinite if the maximum of a row is not finite.
    """
    if scores[0].device.type == "cpu":
        best = [_finite_arg_max(rows) for rows in scores]
        if any(NOT_FINITE in tokens for tokens in best):
            raise NotFinite.of_drafter()
        return best
    tokens = torch.cat(arg_max_on_device(scores)).tolist()
    if NOT_FINITE in tokens:
        raise NotFinite.of_drafter()
    ends = itertools.accumulate(len(rows) for rows in scores)
    return [tokens[end - len(rows) : end] for end, rows in zip(ends, scores, strict=True)]


def arg_max_on_device(scores: Sequence[Tensor]) -> list[Tensor]:
    """Returns the drafter's most likely token of every row, without a device synchronisation.

    On a device, a row without a finite maximum gives `NOT_FINITE`; on the CPU it raises NotFinite.
    Shapes: [R, V] each -> [R] each.
    """
    if scores[0].device.type == "cpu":
        return [torch.tensor(tokens) for tokens in arg_max_of_each(scores)]
    top, best = torch.cat(list(scores)).max(dim=-1)
    best = torch.where(top.isfinite(), best, NOT_FINITE)
    return list(best.split([len(rows) for rows in scores]))


def arg_max_and_tokens(
    drafts: Sequence[tuple[Tensor, Tensor]],
) -> list[tuple[list[int], list[int]]]:
    """Copies what greedy verification reads to the host, with one device synchronisation.

    For each draft: the arg-max of its rows of target logits [N + 1, V], `NOT_FINITE` if the maximum
    is not finite, and its draft tokens [N]. Raises NotFinite if a draft contains `NOT_FINITE`.
    """
    if drafts[0][0].device.type == "cpu":
        return [(_finite_arg_max(rows), tokens.tolist()) for rows, tokens in drafts]
    top, best = torch.cat([rows for rows, _ in drafts]).max(dim=-1)
    on_device = [tokens for _, tokens in drafts if tokens.device.type != "cpu"]
    # one transfer: the arg-max of all rows, then the draft tokens that are not on the host yet
    values = iter(torch.cat([torch.where(top.isfinite(), best, NOT_FINITE), *on_device]).tolist())
    arg_maxes = [list(itertools.islice(values, len(rows))) for rows, _ in drafts]
    drafted = [
        list(itertools.islice(values, len(tokens)))
        if tokens.device.type != "cpu"
        else tokens.tolist()
        for _, tokens in drafts
    ]
    if any(NOT_FINITE in tokens for tokens in drafted):
        raise NotFinite.of_drafter()
    return list(zip(arg_maxes, drafted, strict=True))


def _finite_arg_max(rows: Tensor) -> list[int]:
    values = rows.detach().numpy()
    best = np.argmax(values, axis=-1)  # NaN counts as the maximum
    top = np.take_along_axis(values, best[:, None], axis=-1)[:, 0]
    return np.where(np.isfinite(top), best, NOT_FINITE).tolist()


def _advance(
    index: int, task: Any, result: Any, results: list, pending: list[tuple[int, BatchedCall]]
) -> None:
    """Resumes a task with a result and runs it up to its next call or its end."""
    try:
        pending.append((index, task.send(result)))
    except StopIteration as end:
        results[index] = end.value
