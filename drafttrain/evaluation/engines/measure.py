"""Decode every prompt by the engines of other libraries, each alone in a process of its own.

Their thread pools spin against torch's, so that in an interleaved run both would be slow. They are
measured before it: what is compared with plain decoding is the same prompt, not the same moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from drafttrain.config.base import ConfigError
from drafttrain.config.commands import EvalConfig
from drafttrain.decoding.ctranslate2.settings import placement, transcription, translation
from drafttrain.decoding.ctranslate2.translate import check_placement
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.types import Source
from drafttrain.evaluation.batches.measure import Batch, measure_batches
from drafttrain.evaluation.engines.process import EngineProcess
from drafttrain.evaluation.engines.worker import NAME, Task
from drafttrain.evaluation.jobs import CTRANSLATE2, INT8, Job
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.runner import Decoded, run_interleaved
from drafttrain.models.ctranslate2 import check_convertible, check_installed, convert
from drafttrain.models.loading import LoadedTarget, check_target
from drafttrain.models.speech import hears

ENGINES = {CTRANSLATE2: False, INT8: True}
"""Baselines that are engines: whether their weights have 8 bits."""


@dataclass(frozen=True)
class Phase:
    """What one engine did."""

    decoded: Decoded
    batches: Mapping[int, Batch]
    """By batch size, where several are measured."""


def check_engines(settings: EvalConfig) -> None:
    """Refuse engines that could not decode what is asked for. Raises ConfigError.

    Only config.json is read of the target.
    """
    wanted = [name for name in settings.baselines if name in ENGINES]
    if not wanted or settings.mode != "decode":
        return
    asked = f"baselines has {' and '.join(map(repr, wanted))}"
    temperature = settings.decode.sampling.temperature
    if temperature > 0:
        raise ConfigError(
            f"{asked}, measured greedily, but temperature = {temperature:g} is sampling; leave "
            "ctranslate2 out, or use temperature=0"
        )
    check_installed(asked)
    if settings.target is not None:
        check_convertible(check_target(settings.target), asked)


def decode_alone(
    target: LoadedTarget,
    model: CachedModel,
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    progress: bool = False,
) -> list[Phase]:
    """Decode every prompt greedily by each engine asked for, at every batch size asked for.

    The target is converted to a temporary folder once. Raises ValueError, before anything is
    decoded, for what the target's generation_config asks for and an engine does not honour.
    """
    wanted = [name for name in options.baselines if name in ENGINES]
    if not wanted:
        return []
    limit = model.max_new_tokens(prompts[0].source, options.max_new_tokens)
    heard = hears(target.model.config)
    how = (transcription if heard else translation)(target.model, limit)
    places = {name: placement(target.model, int8=ENGINES[name]) for name in wanted}
    for place in places.values():
        check_placement(place)
    sources = [(_start if heard else _text)(model, prompt.source) for prompt in prompts]
    with TemporaryDirectory() as folder:
        converted = Path(folder, "model")
        converted.mkdir()
        convert(target.model, converted)
        features = _write_features(prompts, Path(folder)) if heard else None
        found = []
        for name, place in places.items():
            task = Task(str(converted), place, how, sources, features)
            with EngineProcess(task, Path(folder)) as process:
                memory = process.memory
                job = Job(name, name, process.decode, own_clock=True, own_memory=memory)
                measured = (len(prompts), options, model.device, progress)
                [decoded] = run_interleaved([job], *measured)
                decoded = replace(decoded, interleaved=False)
                found.append(Phase(decoded, measure_batches([job], [decoded], *measured)))
    return found


def _text(model: CachedModel, source: Source) -> list[int]:
    return source.input_ids.tolist()


def _start(model: CachedModel, source: Source) -> list[int]:
    """What the output of a clip starts from, its language named by the target where it is open."""
    if source.chosen_from is not None:
        source = model.encode(source).source
    return source.prefix.tolist()


def _write_features(prompts: Sequence[Prompt], folder: Path) -> str:
    """The clips' features in a file, in float32."""
    file = folder / "features.safetensors"
    features = [prompt.source.inputs["input_features"].float().cpu() for prompt in prompts]
    save_file({NAME: torch.stack(features)}, file)
    return str(file)
