"""Acceptance heads predict whether a draft token will be accepted (SpecDec++, Section 3.2).

A head reads a state of the draft token: when it is drawn, or at its own position as in the paper
(`state`, see draft_states.py). Each head has its own folder; a trained sweep is a folder of such
folders.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError
from drafttrain.config.runs import head_folders
from drafttrain.models.draft_states import StateKind, check_has_states, state_size
from drafttrain.models.identity import hash_weights
from drafttrain.models.loading import read_config
from drafttrain.models.weight_files import check_weight_files, read_weights


class AcceptanceHeadConfig(PretrainedConfig):
    """Shape of a head, and the drafter, target and sampling it was trained for."""

    model_type = "acceptance-head"

    hidden_size: int = 8
    depth: int = 3
    rejection_weight: float = 6.0
    state: StateKind = "token"
    drafter: dict[str, Any] | None = None
    target: dict[str, Any] | None = None
    sampling: dict[str, Any] | None = None
    mixing: float | None = None
    drafttrain_version: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.depth, int) or self.depth < 0:
            raise ValueError(f"depth = {self.depth!r} must be an integer of 0 or more")
        if not isinstance(self.rejection_weight, int | float):
            raise ValueError(f"rejection_weight = {self.rejection_weight!r} must be a number")
        if self.state not in (known := get_args(StateKind)):
            raise ValueError(f"state = {self.state!r} must be {' or '.join(known)}")
        super().__post_init__(**kwargs)

    @property
    def name(self) -> str:
        """Name of the head in reports and folders, such as D3-w6."""
        return head_name(self.depth, self.rejection_weight)


class AcceptanceHead(PreTrainedModel):
    """`depth` blocks x + SiLU(Linear(x)), each with its own weights, then Linear(h, 1)."""

    config_class = AcceptanceHeadConfig
    base_model_prefix = "head"
    main_input_name = "hidden"

    def __init__(self, config: AcceptanceHeadConfig):
        super().__init__(config)
        width = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.depth))
        self.out = nn.Linear(width, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes acceptance logits in the head's dtype. Shapes: hidden [..., D] -> [...]."""
        x = hidden.to(self.out.weight.dtype)
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.out(x).squeeze(-1)

    def acceptance(self, hidden: Tensor) -> Tensor:
        """Predicts the probability of acceptance. Shapes: hidden [..., D] -> [...]."""
        return self(hidden).sigmoid()


@torch.no_grad()
def quick_judge(head: AcceptanceHead) -> Callable[[Tensor], float]:
    """Returns `head.acceptance` for one state [D]; on the CPU in NumPy, for less call overhead.

    SiLU(2 z) = z + z tanh(z), so a block is x + z + z tanh(z) with halved weights. The weights must
    not change afterwards.
    """
    dtype, device = head.out.weight.dtype, head.device
    if device.type != "cpu" or dtype == torch.bfloat16:
        return lambda hidden: head.acceptance(hidden).item()
    halves = [((block.weight / 2).numpy(), (block.bias / 2).numpy()) for block in head.blocks]
    out, bias = head.out.weight[0].clone().numpy(), head.out.bias.item()

    def judge(hidden: Tensor) -> float:
        x = hidden.to(dtype).numpy()
        for weight, shift in halves:
            z = weight @ x
            z += shift
            x = x + z
            z *= np.tanh(z)
            x += z
        return 0.5 * math.tanh(0.5 * (float(out @ x) + bias)) + 0.5  # tanh cannot overflow

    return judge


def head_name(depth: int, rejection_weight: float) -> str:
    return f"D{depth}-w{rejection_weight:g}"


def load_heads(folder: str | Path) -> dict[str, AcceptanceHead]:
    """Loads heads in eval mode, by name, from the folder of one head, a final/ folder or a run.

    Raises ConfigError if there is no head, or another kind of model.
    """
    folder, heads = Path(folder), {}
    remedy = "give the folder of a head, or the run of recipes/train_acceptance_head.py"
    folders = [folder] if (folder / "config.json").is_file() else head_folders(folder)
    if not folders:
        raise ConfigError(f"no acceptance head in {str(folder)!r}; {remedy}")
    for own in map(str, folders):
        config = read_config(own, f"head {own!r}")
        if config.model_type != AcceptanceHeadConfig.model_type:
            raise ConfigError(
                f"{own!r} holds a {config.model_type!r} model, not an acceptance head; {remedy}"
            )
        check_weight_files(own, f"head {own!r}")
        options = {"config": config, "dtype": torch.float32, "trust_remote_code": False}
        heads[config.name] = read_weights(AcceptanceHead, own, f"head {own!r}", **options).eval()
    return heads


def check_head_shape(head: AcceptanceHead, drafter: PretrainedConfig, name: str) -> None:
    """Checks that the drafter has states of the width that a head reads. Raises ConfigError."""
    check_has_states(drafter)
    width = state_size(drafter, head.config.state)
    if head.config.hidden_size != width:
        raise ConfigError(
            f"head {name!r} reads states of size {head.config.hidden_size}, but the drafter's have "
            f"size {width}; it was trained for another drafter: train one for this drafter"
        )


def check_head_identity(head: AcceptanceHead, drafter: PreTrainedModel, name: str) -> None:
    """Checks that the head was trained for the drafter's weights. Raises ConfigError."""
    trained_for = head.config.drafter or {}
    if (expected := trained_for.get("weights_sha256")) is None:
        raise ConfigError(
            f"head {name!r} does not say which drafter it was trained for; train it with "
            "recipes/train_acceptance_head.py"
        )
    types = (None, torch.float32, torch.bfloat16, torch.float16)  # that of its files may be another
    if all(hash_weights(drafter, dtype) != expected for dtype in types):
        raise ConfigError(
            f"head {name!r} was trained for drafter {trained_for.get('path')!r} with other weights "
            f"(sha256 {expected[:12]}..., this drafter has {hash_weights(drafter)[:12]}...); train "
            "a head for this drafter, or give the drafter it was trained for"
        )


AutoConfig.register(AcceptanceHeadConfig.model_type, AcceptanceHeadConfig)
AutoModel.register(AcceptanceHeadConfig, AcceptanceHead)
