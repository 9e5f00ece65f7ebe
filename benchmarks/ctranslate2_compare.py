"""Compare CTranslate2 with plain decoding and speculation in drafttrain on the same target.

    pip install ctranslate2
    OMP_NUM_THREADS=1 python benchmarks/ctranslate2_compare.py --target MODEL --data FILE \\
        [--drafter FOLDER --k 5] [--compute-types float32,int8]

CTranslate2's own converter converts an encoder-decoder text target to a temporary folder. (It reads
Marian models as OPUS-MT stores them, with the padding token last.) All decode greedily at batch
size 1, interleaved input by input in rotating order. Speedups are over plain decoding in
drafttrain, with 95 % intervals over inputs. Use one thread: the thread pools of the two libraries
slow each other down. Outputs can differ if the target's generation_config sets more than greedy
decoding; `equal` counts equal outputs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from drafttrain.build.method import Method
from drafttrain.build.pairs import load_pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.inputs import DataConfig, TargetConfig
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Output
from drafttrain.decoding.verifiers import GreedyMatch
from drafttrain.evaluation.bootstrap import Ratio, draw_resamples, estimate
from drafttrain.evaluation.metrics import identical
from drafttrain.evaluation.prompts import Prompt, read_prompts
from drafttrain.evaluation.report import describe_environment
from drafttrain.evaluation.runner import Job, make_jobs, run_interleaved

import torch


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    torch.set_num_threads(given.threads)
    pair = load_pair(TargetConfig(path=given.target), [given.drafter or "none"])
    prompts, _ = read_prompts(pair, load_inputs(DataConfig(path=given.data, limit=given.limit)))
    decode = DecodeConfig(sampling=SamplingConfig(max_new_tokens=given.max_new_tokens))
    settings = EvalConfig(decode=decode, repeats=given.repeats, baselines=("generate",))
    jobs = make_jobs(pair, [Method(pair.drafter, FixedLength(given.k), GreedyMatch())], settings)
    for kind in given.compute_types.split(","):
        name = f"ctranslate2 {kind}"
        jobs.append(Job(name, name, converted(given, kind, pair.target.tokenizer)))
    runs = run_interleaved(jobs, prompts, settings, pair.model.device, progress=True)
    resamples = draw_resamples(len(prompts), 1000)
    figures = {}
    for run in runs:
        speedup = estimate(Ratio(runs[0].median_seconds, run.median_seconds), resamples)
        tokens = sum(len(output.tokens) for output in run.outputs)
        milliseconds = 1e3 * float(run.median_seconds.sum()) / tokens
        equal = int(identical(run.outputs, runs[0].outputs).sum())
        figures[run.job.name] = {"speedup": asdict(speedup), "ms_per_token": milliseconds}
        figures[run.job.name] |= {"equal": equal, "prompts": len(prompts)}
        print(
            f"{run.job.name:36} {milliseconds:8.3f} ms per token, {speedup.value:5.2f}x "
            f"({speedup.low:.2f} to {speedup.high:.2f}), {equal} of {len(prompts)} equal"
        )
    if given.out is not None:
        report = {"given": vars(given), "environment": describe_environment().model_dump()}
        text = json.dumps(report | {"figures": figures}, indent=2, default=str)
        given.out.write_text(text + "\n", encoding="utf-8")


def converted(given: argparse.Namespace, kind: str, tokenizer: Any) -> Any:
    """Converts the target; returns a function that decodes prompts with CTranslate2 one by one."""
    import ctranslate2

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        ctranslate2.converters.TransformersConverter(given.target).convert(path)
        translator = ctranslate2.Translator(
            path, compute_type=kind, inter_threads=1, intra_threads=given.threads
        )

    def decode(prompts: Sequence[Prompt], batch_size: int) -> list[Output]:
        outputs = []
        for prompt in prompts:
            source, started = prompt.source.input_ids.tolist(), perf_counter()
            [result] = translator.translate_batch(
                [tokenizer.convert_ids_to_tokens(source)],
                beam_size=1,
                max_input_length=0,
                max_decoding_length=given.max_new_tokens,
                return_end_token=True,
            )
            tokens = tokenizer.convert_tokens_to_ids(result.hypotheses[0])
            outputs.append(Output(tokens, [], perf_counter() - started))
        return outputs

    return decode


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument("--data", required=True, help="file of inputs")
    parser.add_argument("--drafter", help="folder of a drafter")
    parser.add_argument("--k", type=int, default=5, help="draft tokens per round")
    parser.add_argument("--compute-types", default="float32,int8", help="CTranslate2's types")
    parser.add_argument("--limit", type=int, default=50, help="most inputs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
