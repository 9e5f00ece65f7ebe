"""What a language model says at the labelled positions of a batch.

It reads the whole texts; or the labelled tokens alone, behind what another model made of the
prompts: then its cache begins with that model's keys and values, as in decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from drafttrain.data.batches.packing import PADDING, DocumentBatch
from drafttrain.decoding.engine.architectures import layer_masks
from drafttrain.decoding.engine.teacher_forcing import check_projection, projection_scale
from drafttrain.models.spec_drafter.slots import IGNORED


@dataclass(frozen=True)
class Columns:
    """Some of the columns of each sequence of a batch."""

    places: Tensor
    """[B, N] in rising order; behind the last one any."""
    there: Tensor
    """[B, N] false behind the last one."""

    @staticmethod
    def where(wanted: Tensor) -> Columns:
        """Those that are wanted; at least one place in each sequence. Shapes: [B, T] bool."""
        most = max(1, int(wanted.sum(1).max()))
        places = wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        return Columns(places, wanted.gather(1, places))

    def then(self, other: Columns) -> Columns:
        """These, and others behind them."""
        places = torch.cat([self.places, other.places], 1)
        return Columns(places, torch.cat([self.there, other.there], 1))

    def see(self, seen: Columns, mask: Tensor) -> Tensor:
        """Of what is added to attention scores the part of these rows and the columns they may see.

        Shapes: mask [B, 1, T, T], as batches have it -> [B, 1, N, M].
        """
        rows = self.places[:, None, :, None].expand(-1, -1, -1, mask.shape[-1])
        columns = seen.places[:, None, None].expand(-1, -1, self.places.shape[1], -1)
        found = mask.gather(2, rows).gather(3, columns)
        return found.masked_fill(~seen.there[:, None, None], torch.finfo(mask.dtype).min)


@dataclass(frozen=True)
class Prompts:
    """What a model made of a batch's prompts."""

    columns: Columns
    """Where they stand: of S columns each."""
    keys_values: Sequence[tuple[Tensor, Tensor]]
    """Of each layer that was asked for, [B, heads, S, head_dim]."""


@torch.no_grad()
def read_prompts(target: PreTrainedModel, batch: DocumentBatch, layers: Sequence[int]) -> Prompts:
    """Keys and values of a batch's prompts in these layers, in that order; without gradient.

    Prompts are what is neither labelled nor padding: a prompt's last token predicts nothing, as
    collators have it where the target reads prompts.
    """
    assert batch.documents is not None, "padding is not told from prompts"
    columns = Columns.where((batch.labels == IGNORED) & (batch.documents != PADDING))
    cache = DynamicCache()
    target.get_decoder()(
        input_ids=batch.input_ids.gather(1, columns.places),
        attention_mask=_masks(target, columns, columns, batch),
        position_ids=batch.positions.gather(1, columns.places),
        past_key_values=cache,
        use_cache=True,
    )
    found = [cache.layers[layer] for layer in layers]
    return Prompts(columns, [(layer.keys, layer.values) for layer in found])


def text_rows(
    model: PreTrainedModel,
    batch: DocumentBatch,
    wanted: Tensor | None = None,
    prompts: Prompts | None = None,
) -> Tensor:
    """A decoder-only model's logits at every labelled position, of all tokens or of some.

    Where logits are a projection of the last hidden state, other positions go without it: it takes
    most of a shallow model's time. Behind prompts that are given they are not fed at all. Shapes:
    wanted [C] -> [N, V], or [N, C]. Raises ValueError for prompts with a model whose logits are
    more than a projection.
    """
    scale = projection_scale(model) if prompts is None else check_projection(model)
    if prompts is not None:
        return _project(model, _states_behind(model, batch, prompts), scale, wanted)
    counted, mask = batch.labels != IGNORED, batch.mask(model.dtype)
    if mask is not None:
        mask = layer_masks(model.config, mask, batch.positions, batch.positions)
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": mask,
        "position_ids": batch.positions,
        "use_cache": False,
    }
    if scale is None:
        logits = model(**inputs).logits[counted]
        return logits if wanted is None else logits[:, wanted]
    return _project(model, model.get_decoder()(**inputs)[0][counted], scale, wanted)


def _states_behind(model: PreTrainedModel, batch: DocumentBatch, prompts: Prompts) -> Tensor:
    """Last hidden states at the labelled positions, all that is fed. Shapes: -> [N, D]."""
    fed, cache = Columns.where(batch.labels != IGNORED), DynamicCache()
    for layer, (keys, values) in enumerate(prompts.keys_values):
        cache.update(keys.to(model.dtype), values.to(model.dtype), layer)
    hidden = model.get_decoder()(
        input_ids=batch.input_ids.gather(1, fed.places),
        attention_mask=_masks(model, fed, prompts.columns.then(fed), batch),
        position_ids=batch.positions.gather(1, fed.places),
        past_key_values=cache,
        use_cache=False,
    )[0]
    return hidden[fed.there]


def _masks(
    model: PreTrainedModel, rows: Columns, seen: Columns, batch: DocumentBatch
) -> Tensor | dict[str, Tensor]:
    """What these rows see of some columns, as the model's decoder takes it."""
    queries, keys = (batch.positions.gather(1, part.places) for part in (rows, seen))
    return layer_masks(model.config, rows.see(seen, batch.mask(model.dtype)), queries, keys)


def _project(model: PreTrainedModel, hidden: Tensor, scale: float, wanted: Tensor | None) -> Tensor:
    output = model.get_output_embeddings()
    hidden = hidden if scale == 1.0 else hidden * scale
    if wanted is None:
        return output(hidden)
    bias = None if output.bias is None else output.bias[wanted]
    return F.linear(hidden, output.weight[wanted], bias)
