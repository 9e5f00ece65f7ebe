"""Compiling what is trained: each layer of the model, in one graph for batches of all lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

COMPILER: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
"""Dropout draws the same numbers as without compiling: both passes of glancing need that."""
GRAPHS = 64
"""Most graphs of all layers, which share their code: a few for each of several kinds."""


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of a model in place; its names, hooks and weights stay as they are.

    Embeddings, masks and losses differ from objective to objective and take little time: they run
    as before. Sizes of batches are symbols of the graph, so batches of other lengths need no other.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(dynamic=True, **COMPILER)
