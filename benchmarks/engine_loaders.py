"""What vLLM's own code makes of an exported drafter: its settings, and each tensor's place.

    python benchmarks/engine_loaders.py --target TARGET --drafter EXPORT --tokens 5 [--parallel]

Run it where vLLM is installed; neither drafttrain nor a GPU is needed, since nothing is decoded.
vLLM reads target and drafter from their config.json, makes the settings of `--speculative-config`
with all checks that it has, builds the drafter on the CPU and loads its weights by its own names.
Each tensor of the file is then compared with what was loaded. It ends with 1 where a check of
vLLM's refuses the pair, or where a tensor has no place, or a parameter no tensor.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import (
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameters of vLLM's that hold several tensors of a file, one below the other."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or Hub name")
    parser.add_argument("--drafter", required=True, type=Path, help="exported folder")
    parser.add_argument("--tokens", type=int, default=5, help="num_speculative_tokens")
    parser.add_argument("--parallel", action="store_true", help="parallel_drafting")
    options = parser.parse_args(argv)
    print(f"vllm {version('vllm')}, transformers {version('transformers')}")
    try:
        settings = speculative(options)
    except ValueError as error:
        print(f"refused: {error}")
        return 1
    model_config = settings.draft_model_config
    print(f"method {settings.method}, {model_config.architectures}, {model_config.dtype}")
    print(f"rotary positions {getattr(model_config.hf_config, 'rope_parameters', None)}")
    print(f"mask {getattr(model_config.hf_config, 'pard_token', None)}")
    return 0 if loads(options.drafter, model_config.dtype) else 1


def speculative(options: argparse.Namespace) -> SpeculativeConfig:
    """The settings that `vllm serve` makes of the exported command. Raises ValueError."""
    return SpeculativeConfig(
        target_model_config=ModelConfig(model=options.target),
        target_parallel_config=ParallelConfig(),
        method="draft_model",
        model=str(options.drafter),
        num_speculative_tokens=options.tokens,
        parallel_drafting=options.parallel,
    )


def loads(folder: Path, dtype: torch.dtype) -> bool:
    """Whether vLLM finds a place for each tensor and a tensor for each parameter; prints both."""
    config = ModelConfig(model=str(folder), dtype=dtype, enforce_eager=True)
    everything = VllmConfig(model_config=config, device_config=DeviceConfig("cpu"))
    read: list[str] = []
    with set_current_vllm_config(everything):
        meeting_point = f"file://{tempfile.mkdtemp()}/meet"
        init_distributed_environment(1, 0, meeting_point, 0, "gloo")
        initialize_model_parallel(1, 1)
        with set_default_torch_dtype(dtype), torch.device("cpu"):
            model = initialize_model(everything)
        weights = get_model_loader(LoadConfig()).get_all_weights(config, model)
        filled = model.load_weights(noted(weights, read))
    parameters = dict(model.named_parameters())
    file = load_file(folder / "model.safetensors")
    left = sorted(file.keys() - set(read))
    empty = sorted(parameters.keys() - filled)
    other = [name for name in parameters if not same(name, parameters[name], file)]
    print(f"{type(model).__name__}: {len(read)} tensors for {len(parameters)} parameters")
    print(f"output layer is the embeddings: {is_tied(model)}")
    for what, names in (("not read", left), ("not filled", empty), ("other values", other)):
        print(f"{what}: {', '.join(names) or 'none'}")
    return not (left or empty or other)


def noted(weights: Iterator[tuple[str, Tensor]], names: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        names.append(name)
        yield name, weight


def same(name: str, parameter: Tensor, file: dict[str, Tensor]) -> bool:
    """Whether a parameter holds the file's numbers, in its own number type; padding left out."""
    layer, _, kind = name.rpartition(".")
    stem, _, last = layer.rpartition(".")
    parts = [f"{stem}.{part}.{kind}" for part in FUSED[last]] if last in FUSED else [name]
    if not all(part in file for part in parts):
        return False
    expected = torch.cat([file[part] for part in parts]).to(parameter.dtype)
    return torch.equal(parameter.data[: len(expected)], expected)


def is_tied(model: nn.Module) -> bool:
    return model.lm_head.weight is model.model.embed_tokens.weight


if __name__ == "__main__":
    sys.exit(main())
