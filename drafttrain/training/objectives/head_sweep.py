"""Acceptance heads of any depths and rejection weights, trained together on the same batches.

The heads share nothing but their input, so training them together gives the weights that each
would get alone; only the work is shared. A batch is cut into pieces of rows small enough that
activations stay in the processor's cache; within a piece, block b of all heads deeper than b is
one batched product, and forward and backward pass follow one another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from drafttrain.config.recipes import HeadConfig
from drafttrain.data.batches.head_batches import HeadBatch
from drafttrain.models.acceptance_head import AcceptanceHead, AcceptanceHeadConfig, head_name
from drafttrain.training.losses import LossSums, acceptance_loss, acceptance_loss_slope

PIECE_BYTES = {"cpu": 2**21}
"""Size of one activation (all heads' rows of one block) in a piece, by kind of device."""
OTHER_PIECE_BYTES = 2**28
LEAST_ROWS = 512
"""Rows of a piece, whatever their size: products of fewer are slow."""


def make_heads(
    settings: HeadConfig,
    hidden_size: int,
    seed: int,
    mean_acceptance: float | None = None,
    **identity,
) -> list[AcceptanceHead]:
    """Every depth with every rejection weight, in float32.

    Each head's first weights follow from (seed, its name) alone, so they are the same in any sweep;
    its bias starts at the best constant prediction, if the mean label is given. `identity` goes
    into the heads' configurations.
    """
    heads = {}
    for depth in settings.depths:
        for weight in settings.rejection_weights:
            name = head_name(depth, weight)
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            config = AcceptanceHeadConfig(
                hidden_size=hidden_size, depth=depth, rejection_weight=weight, **identity
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest, "big") >> 1)
                heads[name] = AcceptanceHead(config).float()
            if mean_acceptance is not None:
                mean = min(max(mean_acceptance, 1e-4), 1 - 1e-4)
                nn.init.constant_(heads[name].out.bias, math.log(mean / (weight * (1 - mean))))
    return list(heads.values())


class HeadSweep(nn.Module):
    """The objective: each head's weighted cross entropy of acceptance (SpecDec++ Section 3.2)."""

    teacher = None

    def __init__(self, heads: Sequence[AcceptanceHead]):
        super().__init__()
        self.model = nn.ModuleList(heads)
        depths = torch.tensor([head.config.depth for head in heads])
        self.deepest_first = torch.argsort(depths, descending=True, stable=True).tolist()
        weights = torch.tensor([head.config.rejection_weight for head in heads])
        self.register_buffer("rejection_weights", weights[:, None], persistent=False)

    @property
    def parts(self) -> dict[str, AcceptanceHead]:
        """The heads by name, in the order of the sums' vectors."""
        return {head.config.name: head for head in self.model}

    def forward(self, batch: HeadBatch, progress: float) -> LossSums:
        """Sums of every head, [H] each. A prediction is correct if it is on the label's side of
        one half."""
        order = self.deepest_first
        heads = [self.model[i] for i in order]
        weights = self.rejection_weights[order]
        with torch.autocast(batch.hidden.device.type, enabled=False):  # heads are float32
            loss, weight, correct = _SweepLoss.apply(
                batch.hidden,
                batch.acceptance.to(weights.dtype),
                weights,
                torch.is_grad_enabled(),
                *_stack(heads),
            )
        given = torch.empty_like(weight, dtype=torch.long)
        given[order] = torch.arange(len(order), device=given.device)
        counted = torch.full_like(weight, len(batch.acceptance))
        return LossSums(loss[given], weight[given], correct[given], counted)


def _stack(heads: Sequence[AcceptanceHead]) -> list[Tensor]:
    """Weights of heads, deepest first, as [H, D] and [H, 1] of the last layers, then [H_b, D, D]
    and [H_b, D, 1] of each block b that H_b heads have."""
    stacked = [
        torch.cat([head.out.weight for head in heads]),
        torch.stack([head.out.bias for head in heads]),
    ]
    for number in range(heads[0].config.depth):
        blocks = [head.blocks[number] for head in heads if head.config.depth > number]
        stacked.append(torch.stack([block.weight for block in blocks]))
        stacked.append(torch.stack([block.bias for block in blocks])[..., None])
    return stacked


@dataclass(frozen=True)
class _Activations:
    """What a piece of N rows leaves for the backward pass; features before rows, [H_b, D, N]."""

    inputs: list[Tensor]
    """Of block b, and last the output of the deepest; inputs[0] is [D, N], the same for all."""
    inner: list[Tensor]
    """W x + b of block b, before SiLU."""
    logits: Tensor
    """[H, N]"""


class _SweepLoss(torch.autograd.Function):
    """Sums of losses, weights and correct predictions [H] of stacked heads (see `_stack`).

    The gradients are computed along with the losses, piece by piece, so that no activation is
    ever written to memory to be read again; a step's normaliser only scales them.
    """

    @staticmethod
    def forward(ctx, hidden, acceptance, rejection_weights, train, *stacked):
        out_weight, out_bias, *blocks = stacked
        weights, biases = blocks[0::2], blocks[1::2]
        gradients = [torch.zeros_like(tensor) for tensor in stacked] if train else []
        sums = out_weight.new_zeros(3, len(out_weight))
        size = PIECE_BYTES.get(hidden.device.type, OTHER_PIECE_BYTES)
        numbers = (len(weights[0]) if weights else 1) * max(hidden.shape[1], 1)
        rows = max(LEAST_ROWS, size // (4 * numbers))
        for start in range(0, len(hidden), rows):
            labels = acceptance[start : start + rows]
            piece = hidden[start : start + rows]
            x = out_weight.new_empty(piece.shape[::-1]).copy_(piece.t())
            seen = _run_heads(x, out_weight, out_bias, weights, biases)
            loss, weight = acceptance_loss(seen.logits, labels, rejection_weights)
            sums[0] += loss.sum(-1)
            sums[1] += weight.sum(-1)
            sums[2] += ((seen.logits > 0) == (labels > 0.5)).sum(-1)
            if train:
                slope = acceptance_loss_slope(seen.logits, labels, rejection_weights)
                _add_gradients(gradients, seen, slope, out_weight, weights)
        ctx.save_for_backward(*gradients)
        loss, weight, correct = (total.clone() for total in sums)
        ctx.mark_non_differentiable(weight, correct)
        return loss, weight, correct

    @staticmethod
    @once_differentiable
    def backward(ctx, by_loss, *_):
        scaled = [
            gradient * by_loss[: len(gradient)].reshape(-1, *[1] * (gradient.ndim - 1))
            for gradient in ctx.saved_tensors
        ]
        return None, None, None, None, *scaled


def _run_heads(
    x: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> _Activations:
    """Forward pass. Shapes: x [D, N]; the rest as in `_stack`."""
    heads, width = out_weight.shape
    logits = out_bias.repeat(1, x.shape[1])
    shallow = len(weights[0]) if weights else 0
    logits[shallow:].addmm_(out_weight[shallow:], x)
    inputs, inner = [x], []
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if number == 0:  # all heads read the same rows: one product
            z = torch.mm(weight.reshape(-1, width), x).view(len(weight), width, -1).add_(bias)
            x = F.silu(z).add_(x)
        else:
            before = x[: len(weight)]
            z = torch.bmm(weight, before).add_(bias)
            x = F.silu(z).add_(before)
        inputs.append(x)
        inner.append(z)
        deeper = len(weights[number + 1]) if number + 1 < len(weights) else 0
        ends = slice(deeper, len(weight))
        logits[ends] += torch.bmm(out_weight[ends, None], x[ends])[:, 0]
    return _Activations(inputs, inner, logits)


def _add_gradients(
    gradients: Sequence[Tensor],
    seen: _Activations,
    slope: Tensor,
    out_weight: Tensor,
    weights: Sequence[Tensor],
) -> None:
    """Backward pass of one piece, added to `gradients` (as in `_stack`). Shapes: slope [H, N]."""
    by_out, by_bias, *by_blocks = gradients
    by_bias += slope.sum(-1, keepdim=True)
    shallow = len(weights[0]) if weights else 0
    by_out[shallow:].addmm_(slope[shallow:], seen.inputs[0].t())
    flowing = torch.empty_like(seen.inputs[1]) if weights else None
    deeper = 0
    for number in reversed(range(len(weights))):
        x, z, weight = seen.inputs[number], seen.inner[number], weights[number]
        ends = slice(deeper, len(weight))
        by_out[ends] += torch.bmm(seen.inputs[number + 1][ends], slope[ends, :, None])[..., 0]
        torch.mul(out_weight[ends, :, None], slope[ends, None], out=flowing[ends])
        by_z = torch.ops.aten.silu_backward(flowing[: len(weight)], z)
        by_blocks[2 * number + 1] += by_z.sum(-1, keepdim=True)
        if number == 0:
            by_blocks[0].view(-1, len(x)).addmm_(by_z.view(-1, x.shape[1]), x.t())
        else:
            by_blocks[2 * number].baddbmm_(by_z, x[: len(weight)].transpose(1, 2))
            flowing[: len(weight)].baddbmm_(weight.transpose(1, 2), by_z)
        deeper = len(weight)
