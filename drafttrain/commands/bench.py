"""Measure a drafter in servers that are started here, or that run already."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from drafttrain.config.base import ConfigError
from drafttrain.config.command_line import hide_folders
from drafttrain.config.progress import tracking
from drafttrain.config.serving import BenchConfig
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.data.inputs.tokens import tokenize_prompts
from drafttrain.data.servers.probe import find_model
from drafttrain.data.servers.programs import Question
from drafttrain.data.servers.transport import (
    PROBE_SECONDS,
    Connection,
    Failure,
    read_address,
    read_key,
)
from drafttrain.evaluation.bench.llama_server import LlamaServer, check_llama_server
from drafttrain.evaluation.bench.measure import Side, measure_level, play, shared_out
from drafttrain.evaluation.bench.report import BenchReport, level_of, predicted_run
from drafttrain.evaluation.bench.tables import bench_lines, bench_table
from drafttrain.evaluation.environment import describe_environment
from drafttrain.evaluation.report import DataFacts, check_new_file, write_json
from drafttrain.evaluation.table_style import print_findings
from drafttrain.models.loading import check_target, load_tokenizer

NAMES = {1: ("server",), 2: ("without", "with")}
"""What servers are called, by how many there are."""


def bench(settings: BenchConfig) -> None:
    """Ask the servers, write a report after each concurrency, print the table.

    Raises ConfigError before anything starts for what can be known to be wrong, OSError where a
    server fails: what was measured until then is in the report.
    """
    check_new_file(settings.out, "out", (".json",))
    check_servers(settings)
    predicted = predicted_run(settings)
    questions = read_questions(settings)
    warmup, parts = shared_out(questions, len(settings.concurrency), settings.warmup)
    check_prompts(settings, len(questions), parts)
    with ExitStack() as stack:
        sides = open_sides(settings, stack)
        report = BenchReport(
            target=settings.target.path,
            data=DataFacts(path=settings.data.path, prompts=len(questions), references=0),
            environment=describe_environment(),
            options=options_of(settings, sides),
            levels=[],
            predicted=predicted,
        )
        try:
            for side in sides:
                if warmup:
                    play(side, warmup, 1)
            total = sum(map(len, parts))
            with tracking(total, "bench", "prompt") as work:
                for concurrency, part in zip(settings.concurrency, parts, strict=True):
                    waves = measure_level(sides, part, concurrency, work.update)
                    greedy = settings.sampling.temperature == 0.0
                    level = level_of(sides, waves, concurrency, greedy, settings.bootstrap)
                    report = report.model_copy(update={"levels": [*report.levels, level]})
                    write_json(report, settings.out)
        except Failure as failure:
            kept = f"; what was measured is in {settings.out}" if report.levels else ""
            raise OSError(f"{failure}{kept}") from None
    print_findings([bench_table(report)], bench_lines(report), [f"report   {settings.out}"])


def check_servers(settings: BenchConfig) -> None:
    """Whether something to measure is given, once. Raises ConfigError."""
    given, llama = settings.server.urls, settings.llama
    if given and llama.program is not None:
        raise ConfigError("--server and --llama-server are both given; give one of them")
    if given:
        for url in given:
            read_address(url)
        if len(set(given)) < len(given):
            raise ConfigError(
                f"server.urls names {given[0]!r} twice; give a server without the drafter, and one "
                "with it"
            )
        read_key()
    elif llama.program is None:
        raise ConfigError(
            "nothing to measure: give --llama-server PATH with --model and --draft-model, or "
            "--server URL,URL (without the drafter, with it)"
        )
    else:
        check_llama_server(llama)
    if check_target(settings.target).is_encoder_decoder:
        raise ConfigError(
            f"servers answer for decoder-only targets, but target.path = {settings.target.path!r} "
            "is an encoder-decoder model; measure it with drafttrain eval"
        )


def read_questions(settings: BenchConfig) -> list[Question]:
    """The prompts of the data as token ids, each once. Raises ConfigError."""
    rows, sampling = load_inputs(settings.data), settings.sampling
    prompts = tokenize_prompts(load_tokenizer(settings.target), rows, decoder_only=True)
    first = {tuple(ids): row for row, ids in reversed([*enumerate(prompts)]) if ids}
    sampled = sampling.temperature > 0.0
    questions = []
    for ids, row in sorted(first.items(), key=lambda one: one[1]):
        seed = int(np.random.SeedSequence([sampling.seed, row]).generate_state(1)[0])
        questions.append(
            Question(
                model="",
                prompt=ids,
                max_new_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k if sampled else 0,
                top_p=sampling.top_p if sampled else 1.0,
                repetition_penalty=1.0,
                seed=seed & (2**31 - 1) if sampled else None,
            )
        )
    return questions


def check_prompts(settings: BenchConfig, prompts: int, parts: Sequence[Sequence[Question]]) -> None:
    """Whether every concurrency has prompts enough to be reached. Raises ConfigError."""
    for concurrency, part in zip(settings.concurrency, parts, strict=True):
        if len(part) < concurrency:
            raise ConfigError(
                f"{settings.data.path!r} has {prompts} different prompts; shared out, "
                f"{len(part)} are left for concurrency {concurrency}: give more, or fewer values "
                "with --concurrency"
            )


def open_sides(settings: BenchConfig, stack: ExitStack) -> list[Side]:
    """The servers, started where that is asked for, with lines to them. Raises ConfigError."""
    urls, key = list(settings.server.urls), read_key() if settings.server.urls else None
    most = max(settings.concurrency)
    if not urls:
        for drafts in (False, True):
            server = LlamaServer(settings.llama, most, drafts)
            urls.append(stack.enter_context(server).url)
    sides = []
    for name, address in zip(NAMES[len(urls)], map(read_address, urls), strict=True):
        probe = Connection(address, PROBE_SECONDS, key)
        model, program = find_model(probe, settings.server.model, settings.target.path)
        probe.close()
        lines = [Connection(address, settings.server.timeout, key) for _ in range(most)]
        for line in lines:
            stack.callback(line.close)
        sides.append(Side(name, program, model, lines))
    return sides


def options_of(settings: BenchConfig, sides: Sequence[Side]) -> dict[str, object]:
    """What readers need to repeat it, without folders of this machine."""
    llama = settings.llama
    shown: dict[str, object] = {
        "programs": {side.name: side.program.name for side in sides},
        "concurrency": list(settings.concurrency),
        "sampling": settings.sampling.model_dump(),
        "warmup": settings.warmup,
        "n_max": llama.n_max,
        "p_min": llama.p_min,
    }
    if llama.program is not None:
        for name in ("arguments", "draft_arguments"):
            shown[name] = hide_folders(" ".join(getattr(llama, name)))
        shown["models"] = [file.name for file in (llama.model, llama.draft_model) if file]
    return shown
