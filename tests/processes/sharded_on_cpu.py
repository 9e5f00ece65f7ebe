"""Runs a recipe with an FSDP or DeepSpeed file of launch/ on the CPU (gloo), without GPUs.

    python -m torch.distributed.run --standalone --nproc_per_node 2 \\
        tests/processes/sharded_on_cpu.py launch/fsdp2.yaml recipes/train_spec_drafter.py ...

Accelerate uses FSDP and DeepSpeed only on accelerators. This program sets the environment of
`accelerate launch --config_file FILE`, joins the processes by gloo, and then makes Accelerate
assume that it found GPUs. Everything after that is as on GPUs.
"""

import os
import runpy
import sys

from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


def launch_environment(file: str, *options: str) -> dict[str, str]:
    """Returns the environment that `accelerate launch` would set for its processes."""
    arguments = ["--config_file", file, "--main_process_port", "0", *options, "recipe.py"]
    given, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    if given.use_deepspeed:
        given.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(given)
    else:
        environment = prepare_multi_gpu_env(given)
    return {k: v for k, v in environment.items() if k.startswith(("ACCELERATE_", "FSDP_"))}


def main() -> None:
    file, recipe, *arguments = sys.argv[1:]
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.update(launch_environment(file))
    state = PartialState(backend="gloo")
    if state.distributed_type == DistributedType.NO:  # with DeepSpeed it is set already
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    sys.argv = [recipe, *arguments]
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
