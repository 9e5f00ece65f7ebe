"""What do the paper's sizes give on Multi30k: a 6 + 6 target and a 12 + 2 drafter, d 512, k 25?

    python benchmarks/paper_sizes.py --data MULTI30K --out FOLDER

MULTI30K holds train, val and test_2016_flickr as .en.gz and .de.gz. Trains the target, has it
translate the training set greedily, trains the Spec-Drafter, then decodes test sentences one by one
in float32 and bfloat16: strictly, and by Spec-Verification with beta 3 and tau 1, beside plain
decoding, `generate` and beam search. About 8 minutes on one large GPU. On a CPU only for trial:
--target-steps 2 --steps 2 --width 32 --layers 1,1,2,1 --prompts 3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from drafttrain.evaluation.report import Report, Run, read_report

import torch

ROOT = Path(__file__).parents[1]
HEADER = (
    "| dtype | method | mean acceptance length | t_draft ms | t_verify ms | speed-up | vs generate "
    "| vs beam 5 |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    seconds = {}
    for stage, commands in stages(given).items():
        started = perf_counter()
        for command in commands:
            print("$", " ".join(command), flush=True)
            subprocess.run(command, check=True, cwd=ROOT)
        seconds[stage] = perf_counter() - started
    reports = {dtype: read_report(report_path(given, dtype)) for dtype in given.dtypes}
    lines = [HEADER]
    for dtype, report in reports.items():
        lines += [as_line(dtype, run) for run in report.runs]
    times = ", ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items())
    table = "\n".join(lines) + f"\n\n{times}; {hardware(reports)}\n"
    print(table)
    (given.out / "table.md").write_text(table, encoding="utf-8")
    (given.out / "seconds.json").write_text(json.dumps(seconds, indent=2) + "\n", encoding="utf-8")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and figures")
    parser.add_argument("--target-steps", type=int, default=1500, help="of the target's training")
    parser.add_argument("--steps", type=int, default=2000, help="of the drafter's training")
    parser.add_argument("--prompts", type=int, default=100, help="test sentences to decode")
    parser.add_argument("--rows", type=int, default=29000, help="training sentences")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--k", type=int, default=25)
    parser.add_argument(
        "--layers",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[6, 6, 12, 2],
        help="encoder and decoder of the target, then of the drafter",
    )
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="bf16" if on_gpu else "fp32"
    )
    return parser.parse_args(arguments)


def stages(given: argparse.Namespace) -> dict[str, list[list[str]]]:
    """The commands of each stage; all of them go on where they were stopped."""
    decode = [evaluate_command(given, dtype) for dtype in given.dtypes]
    return {"target": [target_command(given)], "drafter": [drafter_command(given)], "eval": decode}


def target_command(given: argparse.Namespace) -> list[str]:
    encoder, decoder = given.layers[:2]
    settings = {
        "run": given.out / "target",
        "data": pair(given, "train", limit=given.rows),
        "held_out": pair(given, "val"),
        "model.d_model": given.width,
        "model.encoder_layers": encoder,
        "model.decoder_layers": decoder,
        "model.encoder_ffn_dim": 4 * given.width,
        "model.decoder_ffn_dim": 4 * given.width,
        "train.max_steps": given.target_steps,
        "train.precision": given.precision,
    }
    return recipe("train_target.py", "multi30k_target.yaml", settings)


def drafter_command(given: argparse.Namespace) -> list[str]:
    encoder, decoder = given.layers[2:]
    settings = {
        "run": given.out / "drafter",
        "target.path": given.out / "target" / "final",
        "data": pair(given, "train", limit=given.rows),
        "held_out": pair(given, "val"),
        "validation_rows": 200,
        "distill.batch_tokens": 32768 if torch.cuda.is_available() else 4096,
        "distill.shard_rows": 29000,
        "distill.sampling.max_new_tokens": given.max_new_tokens,
        "drafter.encoder_layers": encoder,
        "drafter.decoder_layers": decoder,
        "drafter.k": given.k,
        "train.max_steps": given.steps,
        "train.batch_tokens": 32768,
        "train.precision": given.precision,
        "train.validate_every": 500,
        "train.checkpoint_every": 1000,
    }
    return recipe("train_spec_drafter.py", "multi30k_en_de.yaml", settings)


def evaluate_command(given: argparse.Namespace, dtype: str) -> list[str]:
    settings = {
        "target.path": given.out / "target" / "final",
        "target.dtype": dtype,
        "data": pair(given, "test_2016_flickr", limit=given.prompts),
        "decode.drafter": given.out / "drafter" / "final",
        "decode.stop.k": given.k,
        "decode.sampling.max_new_tokens": given.max_new_tokens,
        "sweep": "{beta: [3], tau: [1.0]}",
        "repeats": 1,
        "report": report_path(given, dtype),
    }
    return [sys.executable, "-m", "drafttrain.cli", "eval", *as_overrides(settings)]


def recipe(script: str, config: str, settings: dict) -> list[str]:
    command = [sys.executable, f"recipes/{script}", "--config", f"recipes/{config}"]
    return [*command, *as_overrides(settings)]


def as_overrides(settings: dict) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def pair(given: argparse.Namespace, name: str, limit: int | None = None) -> str:
    """English sentences of Multi30k with their German references, as a group of settings."""
    place = given.data.resolve() / name
    values = {"path": f"{place}.en.gz", "reference_path": f"{place}.de.gz"}
    return json.dumps(values | ({} if limit is None else {"limit": limit}))


def report_path(given: argparse.Namespace, dtype: str) -> Path:
    return given.out / f"report-{dtype}.json"


def as_line(dtype: str, run: Run) -> str:
    """A row of the table: means, times of a round, speed-ups with their 95 % intervals."""
    found = run.metrics
    rounds = run.totals.get("rounds", 0)  # baselines have none
    figures = [with_interval(found.get("mean_acceptance_length"), "")]
    for share in ("draft", "target"):
        if run.time is not None and rounds > 0:
            seconds = run.totals["tokens"] / found["tokens_per_second"].value
            figures.append(f"{1e3 * seconds * run.time[share] / rounds:.2f}")
        else:
            figures.append("–")
    speedups = ("speedup", "speedup_vs_generate", "speedup_vs_beam")
    figures += [with_interval(found.get(name), "×") for name in speedups]
    return f"| {dtype} | {run.name} | " + " | ".join(figures) + " |"


def with_interval(found, unit: str) -> str:
    if found is None:
        return "–"
    return f"{found.value:.2f}{unit} ({found.low:.2f}–{found.high:.2f})"


def hardware(reports: dict[str, Report]) -> str:
    environment = next(iter(reports.values())).environment
    return environment.gpu or f"{environment.cpu}, {environment.threads} threads"


if __name__ == "__main__":
    main()
