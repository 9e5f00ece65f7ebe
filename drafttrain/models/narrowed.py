"""Layers of a target with their hidden size projected down.

P [D, N] has orthonormal columns: the principal components of what goes into the residual stream and
of what is read from it last, the rows of embedding and output projection. The drafter's stream y
stands for x = y P^T. Each norm's gain is folded into the weights that read it; weights that read
the stream become W P, those that write to it P^T W, embeddings E P. Heads, their width and the
feed-forward's keep their sizes. For N = D this is a rotation, which changes nothing (SliceGPT,
Ashkboos et al. 2024, Theorem 1).

For N < D a part of the stream's energy is lost, and the norm divides by that of N numbers: if the
share c is kept, |y|^2 = c |x|^2, so that what reads the stream is scaled by sqrt(c D / N).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from drafttrain.config.base import ConfigError

NARROWED = ("llama", "mistral", "qwen2", "qwen3")
"""Families of layers with RMSNorm in front of both parts and nothing else along the stream."""
READS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
"""Weights that read the stream, and the norm that they read it through."""
WRITES = ("self_attn.o_proj", "mlp.down_proj")
EMBEDDING, OUTPUT, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Projection:
    """Directions that are kept: P [D, N] in float64, and the share c of the energy along them."""

    directions: Tensor
    share: float

    @property
    def scale(self) -> float:
        """Of what reads the stream."""
        size, width = self.directions.shape
        return (self.share * size / width) ** 0.5


def check_width(width: int, target: PretrainedConfig) -> None:
    """Refuse a width that layers of this target cannot have. Raises ConfigError."""
    if target.model_type not in NARROWED:
        raise ConfigError(
            f"initialise.width = {width} is of layers with RMSNorm ({', '.join(NARROWED)}), but "
            f"the target is a {target.model_type!r} model; leave it out, or give initialise.model"
        )
    if width > target.hidden_size:
        raise ConfigError(
            f"initialise.width = {width} is more than the target's hidden size, "
            f"{target.hidden_size}; give as much or less"
        )
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(narrow_config(target, width))
    except (ValueError, StrictDataclassError) as error:
        reason = str(error).splitlines()[-1].strip().removeprefix("ValueError: ").rstrip(".")
        raise ConfigError(
            f"initialise.width = {width}: {reason}; give a multiple of the target's "
            f"{target.num_attention_heads} heads"
        ) from None


def narrow_config(config: PretrainedConfig, width: int) -> PretrainedConfig:
    """The same shape with another hidden size. Heads keep their width, which is named from now on;
    embedding and output are no longer one, since the last norm's gain is in the latter."""
    values = copy.deepcopy(config).to_dict()
    heads = config.num_attention_heads
    values["head_dim"] = values.get("head_dim") or config.hidden_size // heads
    values |= {"hidden_size": width, "tie_word_embeddings": False}
    return type(config).from_dict(values)


@torch.no_grad()
def choose_directions(target: PreTrainedModel, width: int) -> Projection:
    """The principal components of embedding and output rows, both with the same energy in all.

    Raises ValueError for fewer or more directions than there are.
    """
    embedding = target.get_input_embeddings().weight
    output = target.get_output_embeddings().weight * target.state_dict()[FINAL_NORM]
    moment = sum(_energy(rows) for rows in (embedding, output))
    values, vectors = torch.linalg.eigh(moment)
    if not 0 < width <= len(values):
        raise ValueError(f"{width} directions of {len(values)} are asked for")
    share = float(values[-width:].sum() / values.sum())
    return Projection(vectors.flip(-1)[:, :width].contiguous(), min(share, 1.0))


def _energy(rows: Tensor) -> Tensor:
    """Second moments, with a trace of 1. Shapes: [V, D] -> [D, D]."""
    moment = (rows.T @ rows).double().cpu()
    return moment / moment.trace()


@torch.no_grad()
def narrow_weights(weights: Mapping[str, Tensor], projection: Projection) -> dict[str, Tensor]:
    """The weights of a model of `NARROWED`, as those of one of `narrow_config`."""
    return {name: _narrow(name, value, weights, projection) for name, value in weights.items()}


def _narrow(
    name: str, value: Tensor, weights: Mapping[str, Tensor], projection: Projection
) -> Tensor:
    to, exact = projection.directions, value.double().cpu()
    module, _, kind = name.rpartition(".")
    layer, part, last = ([""] * 3 + module.rsplit(".", 2))[-3:]
    if name == EMBEDDING or (f"{part}.{last}" in WRITES and kind == "bias"):
        exact = exact @ to
    elif f"{part}.{last}" in WRITES:
        exact = to.T @ exact
    elif name == FINAL_NORM or last in READS.values():
        exact = torch.ones(to.shape[1])
    elif kind == "weight" and (name == OUTPUT or f"{part}.{last}" in READS):
        norm = FINAL_NORM if name == OUTPUT else f"{layer}.{READS[f'{part}.{last}']}.weight"
        exact = (exact * weights[norm].double().cpu()) @ to * projection.scale
    return exact.to(value.dtype)
