"""A simulated GPU: its tensors have shapes and a device, but no values.

Operations that mix devices raise as on a real GPU. Device synchronisations (`item`, `tolist`,
copies to the CPU) are counted and return zeros (`bool` returns True).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = "cuda"


class OnTheDevice(TorchFunctionMode):
    """Computes normally on CPU tensors, and uses fake tensors for calls that involve the device."""

    def __init__(self) -> None:
        super().__init__()
        self.pretending = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = None
        if function is torch.tensor and _is_away(kwargs.get("device")):
            made = function(*args, **kwargs | {"device": "cpu"})
        elif function is Tensor.to and not isinstance(args[0], FakeTensor) and _is_away(args[1]):
            made = args[0]
        if made is not None:
            with self.pretending:
                return torch.empty(made.shape, dtype=made.dtype, device=DEVICE)
        if not any(map(_is_away, tree_leaves((args, kwargs)))):
            return function(*args, **kwargs)
        with self.pretending:
            return function(*args, **kwargs)


def _is_away(one: Any) -> bool:
    if isinstance(one, (str, torch.device)):
        return str(one).startswith(DEVICE)
    return isinstance(one, FakeTensor)


@dataclass
class Waits:
    """Number of device synchronisations."""

    count: int = 0


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Waits]:
    """Simulates a GPU within the block, for models moved with `moved`; counts synchronisations."""
    waits = Waits()

    def zeros(tensor: Tensor) -> np.ndarray:
        waits.count += 1
        kinds = {torch.bool: bool, torch.float64: float, torch.float32: float}
        return np.zeros(tuple(tensor.shape), dtype=kinds.get(tensor.dtype, np.int64))

    def to_cpu(tensor: Tensor) -> Tensor:
        waits.count += 1
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    changed: dict[str, Any] = {
        "tolist": lambda tensor: zeros(tensor).tolist(),
        "item": lambda tensor: zeros(tensor).item(),
        "__int__": lambda tensor: int(zeros(tensor).item()),
        "__index__": lambda tensor: int(zeros(tensor).item()),
        "__float__": lambda tensor: float(zeros(tensor).item()),
        "__bool__": lambda tensor: not bool(zeros(tensor).item()),
        "numpy": zeros,
        "cpu": to_cpu,
        "contiguous": lambda tensor: torch.ops.aten.clone(
            tensor, memory_format=torch.contiguous_format
        ),
        "__invert__": torch.ops.aten.bitwise_not,
        "index_select": torch.ops.aten.index_select,
        "__getitem__": read,
        "__setitem__": write,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(OnTheDevice())
        for name, function in changed.items():
            stack.enter_context(_where_pretended(name, function))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", Tensor.tolist))
        engine = "drafttrain.decoding.engine"  # no trial runs, as there are no values
        stack.enter_context(mock.patch(f"{engine}.cached_model.probe", lambda *_, **__: None))
        stack.enter_context(mock.patch(f"{engine}.teacher_forcing._try_projection", lambda _: 1.0))
        yield waits


def _where_pretended(name: str, function: Any) -> Any:
    """Patches a tensor method with `function` for calls that involve fake tensors."""
    own = getattr(Tensor, name)

    def method(tensor: Tensor, *given: Any, **named: Any) -> Any:
        others = [*tree_leaves(given)]
        away = any(isinstance(one, FakeTensor) for one in (tensor, *others))
        return function(tensor, *given, **named) if away else own(tensor, *given, **named)

    return mock.patch.object(Tensor, name, method)


def read(tensor: Tensor, key: Any) -> Tensor:
    """Computes tensor[key] with basic operations, because torch's indexing accesses the device."""
    dim, gathered = 0, []
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [one for one in keys if not isinstance(one, Tensor)]:
        place = next(i for i, one in enumerate(keys) if one is Ellipsis)
        used = sum(one is not None for one in keys) - 1
        keys[place : place + 1] = [slice(None)] * (tensor.dim() - used)
    for one in keys:
        if one is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
        elif isinstance(one, slice):
            tensor = torch.ops.aten.slice(tensor, dim, one.start, one.stop, one.step or 1)
            dim += 1
        elif isinstance(one, (int, np.integer)):
            tensor = tensor.select(dim, int(one))
        else:
            rows = torch.tensor(one) if isinstance(one, list) else one
            gathered.append((dim, rows))
            dim += 1
    if gathered:
        found: list[Tensor | None] = [None] * dim
        for place, rows in gathered:
            found[place] = rows
        tensor = torch.ops.aten.index(tensor, found)
    return tensor


def write(tensor: Tensor, key: Any, value: Any) -> None:
    """Assigns tensor[key] = value with basic operations."""
    keys = key if isinstance(key, tuple) else (key,)
    if not any(isinstance(one, Tensor) for one in keys):
        given = value if isinstance(value, Tensor) else torch.tensor(value)
        torch.ops.aten.copy_(read(tensor, key), given)
        return
    found = [one if isinstance(one, Tensor) else None for one in keys]
    assert all(one == slice(None) for one in keys if not isinstance(one, Tensor))
    torch.ops.aten.index_put_(tensor, found, value)


def moved(model: nn.Module) -> nn.Module:
    """Moves a model to the simulated device; only inside `pretended_gpu`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                away = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
                module._parameters[name] = nn.Parameter(away, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                away = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
                module._buffers[name] = away
    return model
