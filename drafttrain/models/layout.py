"""How weights lie in memory, for the small matrix products of decoding on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def store_column_major(model: nn.Module) -> None:
    """Keep float32 CPU weights of linear layers along their longer side; values stay the same.

    A product of a row or two then reads them in the order they lie. An output projection that is
    tied to an embedding gets a copy of its own, since embeddings are looked up row by row;
    `count_parameters` knows of it.
    """
    tied = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    for layer in model.modules():
        if not isinstance(layer, nn.Linear):
            continue
        turned = column_major(layer.weight)
        if turned is layer.weight:
            continue
        if layer.weight.data_ptr() in tied:
            layer.weight = nn.Parameter(turned, requires_grad=False)
            layer.weight.is_copy = True
        else:
            layer.weight.data = turned


def count_parameters(model: nn.Module) -> int:
    """Numbers that the model was trained with: tied weights once, however they lie in memory."""
    return sum(p.numel() for p in model.parameters() if not getattr(p, "is_copy", False))


def column_major(weight: Tensor) -> Tensor:
    """The same matrix, stored column by column if it is float32 on a CPU and at least as high as
    it is wide. Shapes: [A, B]."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    if not plain or weight.shape[0] < weight.shape[1]:
        return weight
    return weight.t().contiguous().t()
