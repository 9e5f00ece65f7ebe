"""FSDP and DeepSpeed in the training loop: they get a copy of the objective, since they shard or
convert it. The task's own objective receives the weights when a complete model is needed."""

import copy

from accelerate import Accelerator
from accelerate.utils import DistributedType, parse_flag_from_env
from torch import nn

from drafttrain.config.base import ConfigError
from drafttrain.config.recipes import TrainConfig
from drafttrain.training.checkpoints import is_sharded, trained_weights
from drafttrain.training.objective import Objective


def check_sharding(accelerator: Accelerator, settings: TrainConfig) -> None:
    """Raises ConfigError for launch settings that would silently train in another way."""
    kind = accelerator.distributed_type
    for requested in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        variable = f"ACCELERATE_USE_{requested.value}"
        if parse_flag_from_env(variable) and kind != requested:
            raise ConfigError(
                f"{variable} is set, but Accelerate offers {requested.value} on GPUs only and fell "
                f"back to {kind.value}; on this machine use launch/cpu.yaml or launch/cpu_2.yaml"
            )
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "fsdp_version = 1: it flattens weights, and then norms and biases would be decayed; "
            "set fsdp_version: 2, as launch/fsdp2.yaml does"
        )
    if kind == DistributedType.DEEPSPEED and settings.accumulation > 1:
        raise ConfigError(
            f"train.accumulation = {settings.accumulation} under DeepSpeed: a step's loss is "
            f"divided by what was counted in all its batches, which DeepSpeed's own accumulation "
            f"cannot do; set train.accumulation=1 and raise train.batch_tokens"
        )


def copy_to_shard(
    accelerator: Accelerator, settings: TrainConfig, objective: Objective
) -> Objective:
    """Returns a copy of the objective for FSDP or DeepSpeed to shard.

    DeepSpeed has its own settings for clipping and gathering of ZeRO-3 weights; this sets them from
    ours. Raises ConfigError for clipping with several models (`Objective.parts`) under DeepSpeed.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        parts = len(objective.parts or ())
        if parts > 1 and settings.clip is not None:
            raise ConfigError(
                f"train.clip = {settings.clip}: DeepSpeed clips all {parts} models together, but "
                "each has a norm of its own; use launch/ddp.yaml, or set train.clip=null"
            )
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_clipping"] = settings.clip or 0.0
        config["train_micro_batch_size_per_gpu"] = 1  # required; batches are cut by tokens
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return copy.deepcopy(objective)


def whole_objective(accelerator: Accelerator, objective: nn.Module, own: Objective) -> Objective:
    """Returns the objective with complete weights on the main process; all processes must call it.

    `own` is the task's objective; `objective` is it, or its copy, as prepared by Accelerate.
    """
    if not is_sharded(accelerator):
        return accelerator.unwrap_model(objective)
    weights = trained_weights(accelerator, objective)
    if accelerator.is_main_process:
        own.model.load_state_dict(weights, strict=False)
        own.to(accelerator.device)
    return own
