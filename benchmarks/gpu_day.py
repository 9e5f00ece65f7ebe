"""Measure a GPU in one command: tests, the quickstart drafter, training, calls of large models.

    python -m benchmarks.gpu_day --minutes 12 --out FOLDER

Runs from a checkout, without installation. Each stage has its own process and time limit; if it
fails or runs out of time, its results so far are kept and the next stage starts. After each stage
FOLDER/results.json and FOLDER/table.md are rewritten; FOLDER/STAGE.log holds its output.

- tests: the environment, and `pytest -m gpu`
- quickstart: trains its drafter, then decodes with its target, eager and compiled, at several batch
  sizes, interleaved with plain decoding, `generate` and beam search
- training: steps per second of the quickstart drafter with 0 and 2 workers and the share of time
  spent waiting for batches; the same, FLOP/s and loss for a 6 + 6 target of d 512 trained from
  scratch for 600 steps (recipes/multi30k_target.yaml), compiled and not
- calls: randomly initialised models in the shapes of large ones, eager and compiled, with 1, 5 and
  13 new tokens, compared with the time to read all weights once at memory bandwidth

--rehearse: tiny sizes on a CPU, where compiled calls are only traced; three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import drafttrain
from drafttrain.build.decoder import SpeculativeDecoder
from drafttrain.config.inputs import DataConfig
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.engine import compiling
from drafttrain.decoding.engine.architectures import encoder_width
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.engine.compiling import CompiledBody
from drafttrain.decoding.engine.sequence_state import SequenceState
from drafttrain.decoding.engine.sources import make_source
from drafttrain.decoding.types import Proposal

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

ROOT = Path(__file__).parents[1]
TARGET, TEXTS = ROOT / "checkpoints/docstrings-target", ROOT / "data/docstrings/test.jsonl.gz"
OPTIONAL = (
    *("pytest", "scipy", "matplotlib", "sacrebleu", "rouge_score", "openai"),
    *("sentencepiece", "soundfile", "jiwer", "hypothesis"),
)
"""Packages that only the tests need."""
LLAMA = {"model_type": "llama", "max_position_embeddings": 2048}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 135 M": LLAMA
    | {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
    "Llama 1.2 B": LLAMA
    | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "Marian 6 + 6, d 512": {"model_type": "marian", "d_model": 512, "vocab_size": 32000}
    | {"encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
    | {"decoder_layers": 6, "decoder_attention_heads": 8, "decoder_ffn_dim": 2048}
    | {"pad_token_id": 0, "decoder_start_token_id": 0},
    "Whisper decoder, 12 layers, d 768": {"model_type": "whisper", "d_model": 768}
    | {"encoder_layers": 1, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    | {"decoder_layers": 12, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072},
}
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 500}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1}
TINY |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
NEW_TOKENS, CACHED, SOURCE = (1, 5, 13), 64, 100
"""New tokens of a timed call, cached tokens before it, encoder states of a source."""

Row = dict[str, Any]


def stage_tests(given: argparse.Namespace) -> Iterator[Row]:
    """Yields the environment in one row, then one row per test."""
    row = {"python": platform.python_version(), "torch": torch.__version__}
    row |= {"transformers": transformers.__version__, "drafttrain": drafttrain.__version__}
    row |= {"device": "cpu", "missing": [name for name in OPTIONAL if find_spec(name) is None]}
    if given.device == "cuda":
        row["device"] = torch.cuda.get_device_name()
        row |= {"memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9}
    yield row | {"bandwidth_gb_per_s": bandwidth(given.device) / 1e9}
    if "pytest" in row["missing"]:
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/devices", "-vv", "--tb=short"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            match = re.match(r"\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", line)
            if match:
                yield {"test": match[1], "outcome": match[2].lower()}


def bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.ones(2**28 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device, 10)


def stage_quickstart(given: argparse.Namespace) -> Iterator[Row]:
    """Trains, then yields a row per method and batch size: tokens per second, equal outputs."""
    run, began = given.out / "quickstart", perf_counter()
    settings = ["train.batch_tokens=4096", "train.epochs=5"]  # the recipe's small steps suit a CPU
    if given.rehearse:
        settings += ["data.limit=8", "held_out.limit=3", "train.max_steps=2"]
    train("quickstart", run, settings)
    yield {"way": "training, distilling included", "seconds": perf_counter() - began}
    rows = load_inputs(DataConfig(path=str(TEXTS), limit=2 if given.rehearse else 64))
    texts, longest = list(rows["source"]), 4 if given.rehearse else 128
    drafters = {"plain": "none", "Spec-Drafter": str(run / "final")}
    decoders = {
        f"{name}, {how}": drafttrain.load(str(TARGET), drafter, compile=compile)
        for compile, how in {"on": "compiled", "off": "eager"}.items()
        for name, drafter in drafters.items()
    }
    plain = decoders["plain, eager"]
    expected = generated(plain, texts, 1, longest, 1)
    for batch in (2,) if given.rehearse else (1, 8, 32):
        methods: dict[str, Callable[[], list[list[int]]]] = {
            name: partial(decoded, decoder, texts, batch, longest)
            for name, decoder in decoders.items()
        }
        for name, beams in (("generate", 1), ("beam 5", 5)):
            methods[name] = partial(generated, plain, texts, batch, longest, beams)
        outputs = {name: decode() for name, decode in methods.items()}  # the first run compiles
        times: dict[str, list[float]] = {name: [] for name in methods}
        for name in list(methods) * (1 if given.rehearse else 3):
            times[name].append(seconds_of(methods[name], given.device, 1))
        for name, output in outputs.items():
            tokens, equal = sum(map(len, output)), map(list.__eq__, output, expected)
            row = {"way": name, "batch": batch, "texts": len(texts), "tokens": tokens}
            row["equal to generate"] = sum(equal)
            yield row | {"tokens per second": tokens / median(times[name])}


def stage_training(given: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per number of workers, a row for the large target, then a row per logged loss.

    FLOP/s count 6 operations per weight and token, forward and backward; half of the tokens pass
    through the encoder and half through the decoder.
    """
    few = ["held_out=null", f"data.limit={20 if given.rehearse else 4000}"]
    steps = f"train.max_steps={2 if given.rehearse else 300}"
    for workers in (0, 2):
        began, run = perf_counter(), given.out / f"workers-{workers}"
        settings = [f"distilled={given.out / 'shards'}", f"train.workers={workers}", steps, *few]
        row = {"drafter": "quickstart", "workers": workers} | trained("quickstart", run, settings)
        yield row | {"seconds, distilling included": perf_counter() - began}
    texts = ["data={path: data/docstrings/train.jsonl.gz}", "held_out=null", "train.log_every=50"]
    if given.multi30k is not None:
        stem = given.multi30k.resolve() / "train"
        texts[0] = f"data={{path: {stem}.en.gz, reference_path: {stem}.de.gz}}"
    settings = [steps.replace("300", "600")]
    if given.rehearse:
        settings += ["model.d_model=32", "model.encoder_layers=1", "model.decoder_layers=1"]
        settings += ["data.limit=20", "vocab_size=300"]
    for compiled in ("false", "true")[: 1 if given.rehearse else 2]:
        run = given.out / f"large-{compiled}"
        overrides = [*texts, *settings, f"train.compile={compiled}"]
        figures = trained("multi30k_target", run, overrides)
        work = 6 * figures["parameters"] * figures["tokens per step"] / 2
        row = {"target": "recipes/multi30k_target.yaml", "compiled": compiled}
        yield row | figures | {"TFLOP/s": work * figures["steps per second"] / 1e12}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        yield {"step": logged["step"], "loss": logged["loss"], "accuracy": logged["accuracy"]}


def train(recipe: str, run: Path, settings: Sequence[str]) -> str:
    """Runs a recipe to its end in a separate process; returns what it prints."""
    command = [sys.executable, "-m", "drafttrain", "train", recipe, f"run={run}", *settings]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.stdout


def trained(recipe: str, run: Path, settings: Sequence[str]) -> Row:
    """Runs a recipe; returns the figures that it prints."""
    text = train(recipe, run, settings).replace(",", "")
    rate, waiting = re.search(r"steps at (\S+) a second; waiting .* took (\S+)", text).groups()
    figures: Row = {"steps per second": float(rate), "waiting": waiting}
    if match := re.search(r"(\d+) parameters .* (\d+) tokens (\d+) batches", text):
        parameters, tokens, batches = map(int, match.groups())
        figures |= {"parameters": parameters, "tokens per step": tokens / batches}
    return figures


def decoded(
    decoder: SpeculativeDecoder, texts: Sequence[str], batch: int, longest: int
) -> list[list[int]]:
    return [one.tokens for one in decoder.generate(texts, longest, batch)]


@torch.inference_mode()
def generated(
    decoder: SpeculativeDecoder, texts: Sequence[str], batch: int, longest: int, beams: int
) -> list[list[int]]:
    """Decodes with the target's own `generate`; outputs include EOS."""
    model, tokenizer, outputs = decoder.decoder.target.model, decoder.tokenizer, []
    end = model.generation_config.eos_token_id
    for first in range(0, len(texts), batch):
        inputs = tokenizer(texts[first : first + batch], return_tensors="pt", padding=True)
        settings = {"num_beams": beams, "do_sample": False, "max_new_tokens": longest}
        for tokens in model.generate(**inputs.to(model.device), **settings)[:, 1:].tolist():
            outputs.append(tokens[: tokens.index(end) + 1] if end in tokens else tokens)
    return outputs


def stage_calls(given: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per model and number of new tokens: milliseconds per call."""
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    speed = bandwidth(given.device)
    for name, shape in SHAPES.items():
        if given.rehearse:
            shape = shape | {key: value for key, value in TINY.items() if key in shape}
        model = random_model(shape, dtype, given.device)
        read = sum(weight.nbytes for weight in model.get_decoder().parameters())
        head = model.get_output_embeddings().weight
        if head is not model.get_decoder().get_input_embeddings().weight:
            read += head.nbytes
        target = CachedModel(model)
        row = {"model": name, "dtype": str(dtype).removeprefix("torch.")}
        state, path = started(target)
        for how, new in product(("eager", "compiled"), NEW_TOKENS):
            if how == "compiled" and target.engine.compiled is None:
                target.engine.compiled = CompiledBody(target.engine.body)
            call = partial(verify, target, state, path, Proposal.chain(path[: new - 1]))
            call(), call()  # fills the cache and compiles
            times = [seconds_of(call, given.device, 1) for _ in range(3 if given.rehearse else 30)]
            figures = {"how": how, "new tokens": new, "ms per call": 1e3 * median(times)}
            yield row | figures | {"ms to read the weights": 1e3 * read / speed}


def random_model(shape: Row, dtype: torch.dtype, device: str) -> PreTrainedModel:
    config = AutoConfig.for_model(**shape)
    kinds = {"llama": AutoModelForCausalLM, "whisper": AutoModelForSpeechSeq2Seq}
    kind = kinds.get(shape["model_type"], AutoModelForSeq2SeqLM)
    with torch.device(device):
        return kind.from_config(config, dtype=dtype).eval()


def started(target: CachedModel) -> tuple[SequenceState, Tensor]:
    """Starts a sequence; returns its state and its tokens, of which all but the last get cached."""
    path = torch.arange(5, 5 + CACHED + 1, device=target.device)
    source = make_source(path, target.model)
    if target.is_encoder_decoder:
        states = torch.randn(SOURCE, encoder_width(target.model), device=target.device)
        source = replace(source, encoded=states.to(target.model.dtype))
    return target.encode(source), path


def verify(target: CachedModel, state: SequenceState, path: Tensor, draft: Proposal) -> None:
    """Scores a draft and drops it from the cache."""
    target.score([(state, path, draft)])
    target.keep(state, torch.arange(0))


def seconds_of(call: Callable[[], object], device: str, times: int) -> float:
    """Mean wall-clock time of several calls, including the device's work."""
    synchronize(device)
    began = perf_counter()
    for _ in range(times):
        call()
    synchronize(device)
    return (perf_counter() - began) / times


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


STAGES = {"tests": stage_tests, "quickstart": stage_quickstart, "training": stage_training}
STAGES["calls"] = stage_calls
SHARES = {"tests": 3, "quickstart": 4, "training": 7, "calls": 3}
"""Shares of the remaining time, by stage."""


def run_stage(name: str, given: argparse.Namespace) -> None:
    """Runs a stage; writes each row as a line of JSON when it is measured."""
    if given.device == "cpu":
        compiling.BACKEND = "eager"  # traces without compiling
    with (given.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for row in STAGES[name](given):
            file.write(json.dumps(row) + "\n")
            file.flush()


def start_stage(name: str, given: argparse.Namespace, limit: float) -> Row:
    """Runs a stage in its own process; returns its outcome with the rows it has written."""
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--stage", name, "--out", str(given.out)]
    command += ["--device", given.device] + ["--rehearse"] * given.rehearse
    command += [] if given.multi30k is None else ["--multi30k", str(given.multi30k)]
    rows, log, began = given.out / f"{name}.jsonl", given.out / f"{name}.log", perf_counter()
    rows.write_text("")
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},  # works without installation
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            outcome = "done" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "cut off"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = {"outcome": outcome, "limit_seconds": limit, "seconds": perf_counter() - began}
    if outcome == "failed":
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        result["error"] = lines[-1] if lines else f"exit code {process.returncode}"
    return result | {"rows": [json.loads(line) for line in rows.read_text().splitlines()]}


def write_results(results: dict[str, Row], out: Path) -> None:
    text = json.dumps(results, indent=2) + "\n"
    tables = []
    for name, stage in results.items():
        tables.append(f"## {name}: {stage['outcome']}, {stage['seconds']:.0f} s\n")
        if "error" in stage:
            tables.append(f"{stage['error']}\n")
        for rows in groups(stage["rows"]):
            head = list(rows[0])
            tables += ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
            tables += ["| " + " | ".join(shown(row[key]) for key in head) + " |" for row in rows]
            tables.append("")
    for name, content in (("results.json", text), ("table.md", "\n".join(tables))):
        (out / f".{name}").write_text(content, encoding="utf-8")
        os.replace(out / f".{name}", out / name)


def groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yields groups of consecutive rows with the same keys."""
    for _, group in groupby(rows, key=list):
        yield list(group)


def shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and runs")
    parser.add_argument("--minutes", type=float, default=12, help="time for all stages together")
    parser.add_argument("--stages", default=",".join(STAGES), help="stages, separated by commas")
    parser.add_argument("--multi30k", type=Path, help="folder of Multi30k, for the large target")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--device", help="cuda or cpu; default: a GPU if there is one")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.rehearse:
        given.device = "cpu"
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.stage is not None:
        return run_stage(given.stage, given)
    if given.device == "cpu" and not given.rehearse:
        parser.error("there is no CUDA device; --rehearse runs tiny sizes on a CPU")
    names, results = given.stages.split(","), {}
    end = perf_counter() + 60 * given.minutes
    for index, name in enumerate(names):
        share = SHARES[name] / sum(SHARES[other] for other in names[index:])
        results[name] = start_stage(name, given, max(1.0, share * (end - perf_counter())))
        write_results(results, given.out)
        print(f"{name}: {results[name]['outcome']}, {results[name]['seconds']:.0f} s", flush=True)
    print((given.out / "table.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
