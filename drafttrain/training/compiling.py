"""Compilation of the trained model, layer by layer, with one graph for all batch lengths."""

from typing import Any

import torch
from torch import nn

COMPILER: dict[str, Any] = {"backend": "inductor", "options": {"fallback_random": True}}
"""Dropout draws the same numbers as without compilation; both passes of glancing need that."""
GRAPHS = 64
"""Maximal number of graphs of all layers, which share their code: a few per kind of layer."""


def compile_layers(model: nn.Module) -> None:
    """Compiles the layers of a model in place; names, hooks and weights do not change.

    Embeddings, masks and losses are not compiled: they differ between objectives and take little
    time. Batch sizes and lengths are symbolic, so other sizes need no other graph.
    """
    torch._dynamo.config.recompile_limit = max(GRAPHS, torch._dynamo.config.recompile_limit)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.compile(dynamic=True, **COMPILER)
