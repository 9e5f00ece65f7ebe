"""Padding of rows of different lengths into one batch, and where rows end."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig


def padded(rows: Sequence[Tensor], padding: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Returns the padded rows and their mask (1 = token). Shapes: [S] each -> [B, T], [B, T]."""
    ids = pad_sequence(list(rows), batch_first=True, padding_value=padding, padding_side=side)
    ones = [torch.ones_like(row) for row in rows]
    return ids, pad_sequence(ones, batch_first=True, padding_side=side)


def end_tokens(config: GenerationConfig) -> tuple[int, ...]:
    """Returns the tokens that end a sequence, in the order of the generation_config."""
    ends = config.eos_token_id
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


def cut_after_eos(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Returns the tokens up to and including the first that ends the sequence."""
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: last + 1])
