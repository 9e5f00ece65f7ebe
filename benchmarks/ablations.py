"""What each ingredient of a Spec-Drafter is worth: variants of one recipe, trained for equal time.

    python benchmarks/ablations.py --config RECIPE --out FOLDER [--only NAME,NAME] [key=value ...]

Every variant of the plan (benchmarks/ablations.yaml) is the recipe with some settings changed. A
short warm-up measures a variant's seconds a step; it then takes as many steps as fit the budget, so
that its learning-rate schedule and its glancing run their whole course. It is measured by decoding
held-out sentences that nothing else has used: those after the recipe's validation_rows.

A variant has a folder of its own in FOLDER and is kept; running the command again goes on with
those that are missing, and writes FOLDER/ablations.json and FOLDER/ablations.md anew.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import datasets
import torch
from ablation_tables import (
    Measured,
    Trained,
    measure_drafter,
    read_facts,
    write_facts,
    write_report,
)
from pydantic import PositiveInt, StringConstraints

from drafttrain.config.base import Config, ConfigError
from drafttrain.config.reading import load_settings, merge_values, validate_settings
from drafttrain.config.recipes import SpecDrafterRecipe
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.evaluation.prompts import Prompt, read_prompts
from drafttrain.models.drafters import load_drafter, read_drafter_settings
from drafttrain.models.loading import LoadedTarget, check_seq2seq, load_target
from drafttrain.models.spec_drafter.initialise import initialise
from drafttrain.models.spec_drafter.model import SpecDrafter
from drafttrain.models.spec_drafter.shape import has_own_output, make_config
from drafttrain.training.loop import Task, batches_of, make_accelerator, prepare, take_step, train
from drafttrain.training.run_folder import save_final

sys.path.append(str(Path(__file__).parents[1] / "recipes"))
recipe = importlib.import_module("train_spec_drafter")


class Variant(Config):
    """One row of the table."""

    settings: tuple[str, ...] = ()
    """key=value settings of the recipe that differ from the common ones."""
    outputs: Literal["distilled", "references"] = "distilled"
    """What is learned: the target's own outputs, or the references of the training data."""
    k: tuple[PositiveInt, ...] = ()
    """Draft lengths to decode with greedily. Default: the one it was trained with."""
    temperature: tuple[float, ...] = ()
    """Temperatures to sample at too, at that length."""

    def cases(self, trained_k: int) -> list[tuple[int, float]]:
        """(draft length, temperature) of all measurements."""
        return [(k, 0.0) for k in self.k or (trained_k,)] + [
            (trained_k, temperature) for temperature in self.temperature
        ]


class Ablations(Config):
    """The plan: what all variants share, and the variants in the order they are run."""

    common: tuple[str, ...] = ()
    """key=value settings of the recipe that all variants share."""
    baseline: str
    """The variant that the others are compared with."""
    variants: dict[Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")], Variant]
    """By name, which is its folder's."""


@dataclass(frozen=True)
class Bench:
    """What all variants share."""

    arguments: argparse.Namespace
    target: LoadedTarget
    model: CachedModel
    prompts: list[Prompt]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    try:
        plan = load_settings(Ablations, arguments.plan)
        variants = chosen_variants(plan, arguments.only)
        settings = {name: recipe_settings(plan, arguments, name) for name in plan.variants}
        for name in variants:
            check_variant(arguments.out / name, plan.variants[name], settings[name])
        bench = open_bench(arguments, settings[plan.baseline])
        for name in variants:
            run_variant(bench, name, plan.variants[name], settings[name])
            print(write_report(arguments.out, list(plan.variants), plan.baseline))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent
    parser.add_argument("--config", type=Path, required=True, help="recipe that is varied (YAML)")
    parser.add_argument("--plan", type=Path, default=here / "ablations.yaml", help="the variants")
    parser.add_argument("--out", type=Path, required=True, help="folder of all variants")
    parser.add_argument("--only", type=comma_separated, default=[], help="variants, as a,b,c")
    parser.add_argument("--seconds", type=float, default=480.0, help="of training, a variant")
    parser.add_argument(
        "--prompts", type=int, help="most sentences decoded; default: all there are"
    )
    parser.add_argument(
        "--timed", type=int, default=100, help="of these, timed beside plain decoding"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for all")
    return parser.parse_intermixed_args()


def comma_separated(text: str) -> list[str]:
    return text.split(",")


def chosen_variants(plan: Ablations, only: list[str]) -> list[str]:
    """Names of the variants to run, in the plan's order. Raises ConfigError for unknown ones."""
    for name in (plan.baseline, *only):
        if name not in plan.variants:
            raise ConfigError(f"no variant {name!r}; there are {', '.join(plan.variants)}")
    return [name for name in plan.variants if not only or name in only]


def recipe_settings(plan: Ablations, arguments: argparse.Namespace, name: str) -> SpecDrafterRecipe:
    """The recipe as this variant has it. It distils nothing that the recipe has distilled."""
    overrides = [*plan.common, *arguments.overrides, *plan.variants[name].settings]
    values = merge_values(arguments.config, overrides)
    values.setdefault("distilled", str(Path(values.get("run", "")) / "distilled"))
    values["run"] = str(arguments.out / name)
    values.setdefault("train", {})["threads"] = arguments.threads
    return validate_settings(SpecDrafterRecipe, values)


def check_variant(folder: Path, variant: Variant, settings: SpecDrafterRecipe) -> None:
    """Refuse what can be known to be wrong before anything is trained. Raises ConfigError."""
    if settings.held_out is None:
        raise ConfigError("held_out is missing; give held_out.path, to measure variants on")
    config = make_config(check_seq2seq(settings.target), settings.drafter, None)
    try:
        with torch.device("meta"):
            SpecDrafter(config)
    except ValueError as error:
        raise ConfigError(f"variant {folder.name!r}: {error}") from None
    if config.prefix_attention == "bidirectional" and settings.objective.blocks != 1:
        raise ConfigError(f"variant {folder.name!r}: a bidirectional prefix takes 1 block")
    trained = read_facts(folder / "trained.json", Trained)
    if trained is not None and trained.settings != described(settings, variant):
        raise ConfigError(
            f"{folder} was trained with other settings; delete it, or give another --out"
        )


def described(settings: SpecDrafterRecipe, variant: Variant) -> dict[str, Any]:
    """All that decides what is trained, but for the budget."""
    return settings.model_dump(mode="json") | {"outputs": variant.outputs}


def open_bench(arguments: argparse.Namespace, settings: SpecDrafterRecipe) -> Bench:
    """The target, and the held-out sentences after those used in validation."""
    held_out = settings.held_out
    data = held_out.model_copy(
        update={"skip": held_out.skip + settings.validation_rows, "limit": arguments.prompts}
    )
    rows = load_inputs(data, "held_out")
    target = load_target(settings.target)
    model = CachedModel(target.model)
    prompts, _ = read_prompts(target, model, rows)
    return Bench(arguments, target, model, prompts)


def run_variant(bench: Bench, name: str, variant: Variant, settings: SpecDrafterRecipe) -> None:
    """Train and measure what is not there yet."""
    folder = settings.run
    if not (folder / "trained.json").is_file():
        print(f"{name}: {', '.join(variant.settings) or 'the recipe itself'}", flush=True)
        write_facts(folder / "trained.json", train_variant(bench, variant, settings))
    found = read_facts(folder / "measured.json", Measured)
    cases = variant.cases(settings.drafter.k)
    if found is None or not found.covers(cases, len(bench.prompts)):
        shape = read_drafter_settings(str(folder / "final"))
        model = load_drafter(folder / "final", shape, bench.target)
        measured = measure_drafter(
            bench.target, bench.model, model, bench.prompts, cases, bench.arguments.timed
        )
        write_facts(folder / "measured.json", measured)


def train_variant(bench: Bench, variant: Variant, settings: SpecDrafterRecipe) -> Trained:
    """Train for the budget and save `final/`; what an interrupted try left is begun again."""
    shutil.rmtree(settings.run, ignore_errors=True)
    settings.run.mkdir(parents=True)
    rows = training_rows(bench.target, variant, settings)
    seconds_per_step = step_seconds(bench, settings, rows)
    steps = max(1, round(bench.arguments.seconds / seconds_per_step))
    average = settings.train.average
    every = steps if average == 1 else max(1, steps // (4 * average))
    loop = settings.train.model_copy(update={"max_steps": steps, "checkpoint_every": every})
    drafter, task = make_task(bench, settings, rows)
    accelerator = make_accelerator(loop, settings.run)
    started = perf_counter()
    train(accelerator, task, loop, settings.run)
    seconds = perf_counter() - started
    save_final(settings.run, drafter.cpu(), bench.target.tokenizer)
    shutil.rmtree(settings.run / "checkpoints")
    return Trained(
        settings=described(settings, variant),
        seconds=seconds,
        seconds_per_step=seconds_per_step,
        steps=steps,
        parameters=drafter.num_parameters(),
        rows=len(rows),
    )


def make_task(
    bench: Bench, settings: SpecDrafterRecipe, rows: datasets.Dataset
) -> tuple[SpecDrafter, Task]:
    """A fresh drafter and its task, as the recipe makes them, without validation."""
    target = bench.target
    shape = make_config(
        target.model.config,
        settings.drafter,
        recipe.choose_mask(target.tokenizer, target.model.config),
        recipe.identity(settings),
        has_own_output(target.model),
    )
    torch.manual_seed(settings.train.seed)
    drafter = SpecDrafter(shape)
    initialise(drafter, target.model, settings.drafter.initialise)
    return drafter, recipe.make_task(settings, drafter, rows, None, target)


def step_seconds(bench: Bench, settings: SpecDrafterRecipe, rows: datasets.Dataset) -> float:
    """Mean time of a step, over a twentieth of the budget, after two steps to warm up."""
    _, task = make_task(bench, settings, rows)
    prepared = prepare(make_accelerator(settings.train, settings.run), task, settings.train)
    prepared.objective.train()
    batches = chain.from_iterable(batches_of(prepared, n, n + 50) for n in count(0, 50))
    for _ in range(2):
        take_step(prepared, batches, 0.0)
    steps, started = 0, perf_counter()
    while steps < 2 or perf_counter() - started < bench.arguments.seconds / 20:
        take_step(prepared, batches, 0.0)
        steps += 1
    return (perf_counter() - started) / steps


def training_rows(
    target: LoadedTarget, variant: Variant, settings: SpecDrafterRecipe
) -> datasets.Dataset:
    """Distilled rows, made where they are missing; or the same sources with their references."""
    alone = settings.model_copy(update={"held_out": None})
    rows, _ = recipe.distilled_rows(alone, target, recipe.open_decoder)
    if variant.outputs == "distilled":
        return rows
    references = load_inputs(settings.data)["reference"]
    texts = [references[row] for row in rows["row"]]
    if None in texts:
        raise ConfigError("data has no references; give data.reference_path")
    tokenised = target.tokenizer(text_target=texts)["input_ids"]
    return rows.remove_columns("target_ids").add_column("target_ids", tokenised)


if __name__ == "__main__":
    main()
