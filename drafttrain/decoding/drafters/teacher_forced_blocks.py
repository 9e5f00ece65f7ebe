"""Blocks of a Spec-Drafter at all prefixes of a known output, in one forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.decoding.drafters.candidates import CANDIDATES
from drafttrain.decoding.engine.spec_drafter import RowReader
from drafttrain.decoding.sampling import likeliest
from drafttrain.models.spec_drafter.layout import lay_out
from drafttrain.models.spec_drafter.model import SpecDrafter


@torch.inference_mode()
def block_rows(
    model: SpecDrafter,
    source: Tensor,
    target_ids: Tensor,
    given: Sequence[int] = (),
) -> Tensor:
    """Computes the logits of blocks at every prefix length 0..L-1 of a known output, in one pass.

    source: token ids, or the target's encoder states if the drafter reads those. given: tokens
    between the decoder start token and the output. With previous-token features, slot i reads the
    output's token y_{i-1}. A slot counts only if all earlier slots are right, and then decoding
    would have read the same token. The previous token changes only the scores of a slot's best
    candidates. Shapes: source [S] or [S, D], target_ids [L] -> [L, k, V].
    """
    shape, config, device = model.shape, model.config, model.device
    count = len(target_ids)
    target_ids = torch.cat((torch.tensor(given, dtype=target_ids.dtype), target_ids.cpu()))
    starts = torch.arange(len(given), len(target_ids))
    if shape.bidirectional:
        starts = starts[:, None]
        sources, targets = source.expand(count, *source.shape), target_ids.expand(count, -1)
    else:
        starts = starts[None]
        sources, targets = source[None], target_ids[None]
    lengths = torch.full((len(targets),), len(target_ids))
    layout = lay_out(targets, lengths, starts, shape, config.k, config.decoder_start_token_id)
    layout = layout.to(device)
    read = RowReader(model)
    hidden = read(layout.rows, read.encode(sources.to(device), None)).hidden
    states = layout.of_blocks(hidden).reshape(count, shape.masks(config.k), model.width)
    previous = layout.of_blocks(layout.previous).reshape(count, shape.masks(config.k))
    if shape.anchored:
        first = starts[0].to(device)  # the row of the last committed token is the first slot
        states = torch.cat((layout.of_prefix(hidden)[0, first][:, None], states), dim=1)
        anchor = layout.of_prefix(layout.previous)[0, first][:, None]
        previous = torch.cat((anchor, previous), dim=1)
    logits = model.logits(states)
    if model.previous_token is None:
        return logits
    _, best = likeliest(logits.flatten(0, 1), CANDIDATES)
    best = best.unflatten(0, logits.shape[:-1])
    return logits.scatter(-1, best, model.logits(states, previous).gather(-1, best))
