"""Block heads: the drafter of Blockwise Decoding (Stern et al. 2018), on a frozen target.

Head j of k - 1 reads the target's last hidden state, from which the target predicts its next token,
and predicts the j-th token after that one. The heads have no output projection of their own: their
results go through the target's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel


class BlockHeadsConfig(PretrainedConfig):
    """Shape of block heads and of their target."""

    model_type = "block-heads"

    k: int = 25
    hidden_size: int = 8
    ffn_size: int = 8
    vocab_size: int = 32
    target: dict[str, Any] | None = None
    drafttrain_version: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.k, int) or self.k < 2:
            raise ValueError(
                f"k = {self.k!r} must be 2 or more: a block is the target's own token and one more"
            )
        super().__post_init__(**kwargs)

    @property
    def heads(self) -> int:
        """Number of tokens in a block without the target's own."""
        return self.k - 1


class BlockHeads(PreTrainedModel):
    """k - 1 heads x + relu(x W + b) W' + b', each with its own weights; W' and b' start at 0."""

    config_class = BlockHeadsConfig
    base_model_prefix = "heads"
    main_input_name = "hidden"

    def __init__(self, config: BlockHeadsConfig):
        super().__init__(config)
        heads, width, inner = config.heads, config.hidden_size, config.ffn_size
        self.inner_weight = nn.Parameter(torch.empty(heads, width, inner))
        self.inner_bias = nn.Parameter(torch.empty(heads, 1, inner))
        self.outer_weight = nn.Parameter(torch.empty(heads, inner, width))
        self.outer_bias = nn.Parameter(torch.empty(heads, 1, width))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, BlockHeads):
            nn.init.normal_(module.inner_weight, std=module.config.hidden_size**-0.5)
            for parameter in (module.inner_bias, module.outer_weight, module.outer_bias):
                nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes head states for rows sorted by head: the first counts[0] rows go through head 1,
        the next counts[1] rows through head 2, and so on.

        Shapes: hidden [M, D], one count per head with sum M -> [M, D], for the output projection.
        """
        weights = zip(*(parameter.unbind() for parameter in self._stacks()), strict=True)
        return torch.cat(
            [
                rows + torch.addmm(outer_bias, torch.addmm(bias, rows, inner).relu(), outer)
                for rows, (inner, bias, outer, outer_bias) in zip(
                    hidden.split(list(counts)), weights, strict=True
                )
            ]
        )

    def each(self, hidden: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Computes the states of all rows for each of the heads first..last-1, counted from 0.

        Shapes: hidden [N, D] -> [H, N, D], for the output projection; H is smaller if `last` is
        past the last head.
        """
        inner, bias, outer, outer_bias = (parameter[first:last] for parameter in self._stacks())
        rows = hidden.to(inner.dtype).expand(len(inner), -1, -1)
        return rows + torch.baddbmm(outer_bias, torch.baddbmm(bias, rows, inner).relu(), outer)

    def _stacks(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.inner_weight, self.inner_bias, self.outer_weight, self.outer_bias


AutoConfig.register(BlockHeadsConfig.model_type, BlockHeadsConfig)
AutoModel.register(BlockHeadsConfig, BlockHeads)
