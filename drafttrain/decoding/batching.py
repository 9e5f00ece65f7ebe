"""Coroutine scheduler that batches model calls across sequences.

Drafting for one sequence is a generator. It yields a `BatchedCall` for each function that costs
about as much for one sequence as for all of them (mainly model calls), and receives the result.
`run_batched` advances the generators of all sequences and merges their pending calls of the same
function into one call. A method is therefore written, read and proven for one sequence, and still
runs in batches.
"""

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

    def advance(index: int, received: Any) -> None:
        """Resumes a task and runs it up to its next call or its end."""
        try:
            pending.append((index, tasks[index].send(received)))
        except StopIteration as end:
            results[index] = end.value

    for index, task in enumerate(tasks):
        if isinstance(task, Generator):
            advance(index, None)
    while pending:
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for index, call in pending:
            groups.setdefault(call.function, []).append((index, call.argument))
        pending.clear()
        for function, group in groups.items():
            returned = function([argument for _, argument in group])
            for (index, _), result in zip(group, returned, strict=True):
                advance(index, result)
    return results


def as_steps(task: BatchedSteps[T] | T) -> BatchedSteps[T]:
    """Wraps a task that may be a plain result, so that `yield from` works for both."""
    return (yield from task) if isinstance(task, Generator) else task


def run_single(task: BatchedSteps[T] | T) -> T:
    """Runs one task and returns its result."""
    return run_batched([task])[0]


def to_host(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns the values of integer tensors [N], with at most one device synchronisation."""
    on_device = [one for one in tensors if one.device.type != "cpu"]
    copied = iter(torch.cat(on_device).tolist() if on_device else ())
    return [
        one.tolist() if one.device.type == "cpu" else list(itertools.islice(copied, len(one)))
        for one in tensors
    ]


def arg_max_of_each(scores: Sequence[Tensor]) -> list[list[int]]:
    """Returns the drafter's most likely token of every row, with one device synchronisation.

    Shapes: [R, V] each -> R tokens each. Raises NotFinite if the maximum of a row is not finite.
    """
    return _checked(to_host(_arg_max(scores)))


def arg_max_on_device(scores: Sequence[Tensor]) -> list[Tensor]:
    """Returns the drafter's most likely token of every row, without a device synchronisation.

    On a device, a row without a finite maximum gives `NOT_FINITE`; on the CPU it raises NotFinite.
    Shapes: [R, V] each -> [R] each.
    """
    best = _arg_max(scores)
    if scores[0].device.type == "cpu":
        _checked(to_host(best))
    return best


def arg_max_and_tokens(
    drafts: Sequence[tuple[Tensor, Tensor]],
) -> list[tuple[list[int], list[int]]]:
    """Copies what greedy verification reads to the host, with one device synchronisation.

    For each draft: the arg-max of its rows of target logits [N + 1, V], `NOT_FINITE` if the maximum
    is not finite, and its draft tokens [N]. Raises NotFinite if a draft contains `NOT_FINITE`.
    """
    logits, tokens = zip(*drafts, strict=True)
    values = to_host([*_arg_max(logits), *tokens])
    drafted = _checked(values[len(drafts) :])
    return list(zip(values[: len(drafts)], drafted, strict=True))


def _arg_max(scores: Sequence[Tensor]) -> list[Tensor]:
    """Returns the arg-max of every row, `NOT_FINITE` if the maximum is not finite."""
    if scores[0].device.type == "cpu":
        return [_arg_max_on_cpu(rows.detach().numpy()) for rows in scores]
    top, best = torch.cat(list(scores)).max(dim=-1)
    best = torch.where(top.isfinite(), best, NOT_FINITE)
    return list(best.split([len(rows) for rows in scores]))


def _arg_max_on_cpu(rows: np.ndarray) -> Tensor:
    best = np.argmax(rows, axis=-1)  # NaN counts as the maximum
    top = np.take_along_axis(rows, best[:, None], axis=-1)[:, 0]
    return torch.from_numpy(np.where(np.isfinite(top), best, NOT_FINITE))


def _checked(drafted: list[list[int]]) -> list[list[int]]:
    """Returns the draft tokens. Raises NotFinite if one of them is `NOT_FINITE`."""
    if any(NOT_FINITE in tokens for tokens in drafted):
        raise NotFinite.of_drafter()
    return drafted
