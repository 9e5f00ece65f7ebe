"""The command `drafttrain`. Nothing heavy is imported before the arguments have been checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from drafttrain.commands.options import (
    Beta,
    Cascade,
    ConfigFile,
    Data,
    Debug,
    Drafter,
    DraftLength,
    Head,
    Increments,
    Leniency,
    Limit,
    Overrides,
    Seed,
    StopKind,
    Target,
    Tau,
    Temperature,
    Threshold,
    Tree,
    VerifierKind,
    decode_flags,
    stop_flags,
)
from drafttrain.commands.shell import TYPER_STYLE, quiet_libraries, run_command
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import (
    BigramsConfig,
    CacheConfig,
    DistillConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    TuneCascadeConfig,
    TuneConfig,
)
from drafttrain.config.reading import (
    check_settings,
    load_settings,
    merge_values,
    validate_settings,
)
from drafttrain.config.runs import fill_data, fill_from_heads, fill_from_run, head_run_of, run_of

app = typer.Typer(**TYPER_STYLE)


@app.callback()
def drafttrain() -> None:
    """Train, measure and serve drafters for speculative decoding.

    A drafter proposes several tokens at once; the target checks them in one call.

    \b
    Examples:
      drafttrain distill --target t5-small --data texts.txt --out shards
      accelerate launch recipes/train_spec_drafter.py target.path=t5-small ...
      drafttrain eval
      drafttrain generate --text "the house is small" --show-rounds
    """


@app.command()
def distill(
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Target = None,
    data: Data = None,
    limit: Limit = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder for the shards.")] = None,
    method: Annotated[str | None, typer.Option("--method", help="greedy, beam or sample.")] = None,
    seed: Seed = None,
    temperature: Temperature = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, write nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the target's own outputs as training data: Parquet shards with a manifest.

    Targets are encoder-decoder (T5, BART, ...) or decoder-only (Llama, Qwen, GPT-2, ...).
    Running it again continues where it stopped.

    \b
    Examples:
      drafttrain distill --target t5-small --data texts.txt.gz --out shards
      drafttrain distill --target t5-small --data rows.jsonl --out shards --dry-run
      drafttrain distill --config distill.yaml method=beam num_beams=5
      drafttrain distill --target gpt2 --data prompts.jsonl --out shards \\
          --method sample --temperature 1 sampling.top_k=50 batch_tokens=16384
      drafttrain distill --target Qwen/Qwen3-0.6B --data chats.jsonl --out shards
      drafttrain distill --target Qwen/Qwen3-0.6B --data questions.txt --out shards data.chat=true
      accelerate launch -m drafttrain.cli distill --config distill.yaml
      drafttrain distill --config distill.yaml share=0/4  # the first of four machines
    """
    flags = {
        "target.path": target,
        "data.path": data,
        "data.limit": limit,
        "out": out,
        "method": method,
        "sampling.seed": seed,
        "sampling.temperature": temperature,
    }
    settings = load_settings(DistillConfig, config, overrides or (), flags)
    quiet_libraries()
    from drafttrain.data.distill import distill as distillation

    if dry_run:
        typer.echo(distillation.plan_distillation(settings))
    else:
        distillation.distill(settings)


@app.command()
def cache(
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Target = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Folder or Hub name of the drafter.")
    ] = None,
    distilled: Annotated[
        str | None, typer.Option("--distilled", help="Folder made by `drafttrain distill`.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="Folder for the shards.")] = None,
    mixing: Annotated[
        str | None,
        typer.Option("--mixing", metavar="FLOAT", help="Share of the output's own tokens."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, or float16: half the disk.")
    ] = None,
    seed: Seed = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, write nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Compute once what acceptance heads learn from: a drafter's hidden states, with labels.

    Running it again continues where it stopped.

    \b
    Examples:
      drafttrain cache --target gpt2-large --drafter gpt2 --distilled shards --out cache --dry-run
      drafttrain cache --target gpt2-large --drafter gpt2 --distilled shards --out cache
      drafttrain cache --config cache.yaml mixes=2 sampling.temperature=1 sampling.top_k=50
      accelerate launch -m drafttrain.cli cache --config cache.yaml
    """
    flags = {
        "target.path": target,
        "drafter": drafter,
        "distilled": distilled,
        "out": out,
        "mixing": mixing,
        "dtype": dtype,
        "seed": seed,
    }
    settings = load_settings(CacheConfig, config, overrides or (), flags)
    quiet_libraries()
    from drafttrain.data.hidden import cache as hidden_cache

    if dry_run:
        typer.echo(hidden_cache.plan_cache(settings))
    else:
        hidden_cache.build_cache(settings)


@app.command()
def bigrams(
    overrides: Overrides = None,
    config: ConfigFile = None,
    distilled: Annotated[
        str | None, typer.Option("--distilled", help="Folder made by `drafttrain distill`.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="The table, .safetensors.")] = None,
    debug: Debug = False,
) -> None:
    """Count which token usually follows each in a target's outputs, for drafts by Max-Gram.

    \b
    Examples:
      drafttrain bigrams --distilled shards --out bigrams.safetensors
      drafttrain eval --target t5-small --drafter max-gram --data test.txt \\
          decode.bigrams=bigrams.safetensors
    """
    settings = load_settings(
        BigramsConfig, config, overrides or (), {"distilled": distilled, "out": out}
    )
    quiet_libraries()
    from drafttrain.data.bigrams import write_bigrams

    write_bigrams(settings)


@app.command("eval")
def evaluate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Target = None,
    drafter: Drafter = None,
    data: Data = None,
    limit: Limit = None,
    report: Annotated[
        str | None,
        typer.Option("--report", help="report.json to write; samples and plot lie beside it."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="decode: the truth. teacher-forced: a fast estimate."),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            help="Values of k, h, entropy, delta, beta, tau, as k=5,10; may be repeated.",
        ),
    ] = None,
    tree: Tree = None,
    cascade: Cascade = None,
    increments: Increments = None,
    leniency: Leniency = None,
    k: DraftLength = None,
    stop: StopKind = None,
    head: Head = None,
    h: Threshold = None,
    verifier: VerifierKind = None,
    beta: Beta = None,
    tau: Tau = None,
    temperature: Temperature = None,
    seed: Seed = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all but the weights; say what would be done.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure a drafter: mean acceptance length, speed against plain decoding, quality.

    Without --target and --drafter: the newest run in checkpoints/, on its own held-out rows.

    \b
    Examples:
      drafttrain eval
      drafttrain eval --drafter checkpoints/my-run --data test.txt --limit 200
      drafttrain eval --sweep k=5,10,15,25 --sweep beta=3,5 --sweep tau=1,2
      drafttrain eval --head HEAD --sweep k=2,4,6,8 --sweep h=0.3,0.5,0.7
      drafttrain eval --target t5-small --drafter max-gram --data test.txt
      drafttrain eval --drafter LARGE --cascade SMALL,max-gram --increments 5,3,0/4,10/10
      drafttrain eval --target t5-small --drafter none --data test.txt
    """
    flags = {
        "target.path": target,
        "data.path": data,
        "data.limit": limit,
        "report": report,
        "mode": mode,
        "decode.tree.kind": tree,
        "decode.cascade.drafters": cascade,
        "decode.cascade.increments": increments,
        "decode.cascade.leniency": leniency,
        **stop_flags(stop, k, head, h),
        **decode_flags(drafter, verifier, beta, tau, temperature, seed),
    }
    from drafttrain.config.sweep import expand_sweep, parse_sweep

    values = merge_values(config, overrides or (), flags)
    if sweep:
        values["sweep"] = parse_sweep(sweep)
    check_settings(EvalConfig, values)
    settings = validate_settings(EvalConfig, fill_data(fill_from_run(values)))
    expand_sweep(settings.decode, settings.sweep)
    if settings.report is None:
        run = run_of(str(settings.decode.drafter))
        folder = Path() if run is None else run.folder
        settings = settings.model_copy(update={"report": folder / "report.json"})
    quiet_libraries()
    from drafttrain.commands.eval import measure

    measure(settings, dry_run)


@app.command()
def generate(
    overrides: Overrides = None,
    config: ConfigFile = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="An input; may be repeated.")
    ] = None,
    data: Data = None,
    limit: Limit = None,
    target: Target = None,
    drafter: Drafter = None,
    show_rounds: Annotated[
        bool, typer.Option("--show-rounds", help="Show what each round drafted and accepted.")
    ] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, with all rounds.")
    ] = False,
    tree: Tree = None,
    cascade: Cascade = None,
    increments: Increments = None,
    leniency: Leniency = None,
    k: DraftLength = None,
    stop: StopKind = None,
    head: Head = None,
    h: Threshold = None,
    verifier: VerifierKind = None,
    beta: Beta = None,
    tau: Tau = None,
    temperature: Temperature = None,
    seed: Seed = None,
    debug: Debug = False,
) -> None:
    """Decode texts, written out as their tokens are committed.

    Inputs are --text, --data or the lines of standard input. Without --target and --drafter: the
    newest run in checkpoints/.

    \b
    Examples:
      drafttrain generate --text "the house is small" --show-rounds
      drafttrain generate --drafter checkpoints/my-run/final < texts.txt > outputs.txt
      drafttrain generate --target t5-small --drafter none --data texts.txt --json
    """
    flags = {
        "target.path": target,
        "data.path": data,
        "data.limit": limit,
        "decode.tree.kind": tree,
        "decode.cascade.drafters": cascade,
        "decode.cascade.increments": increments,
        "decode.cascade.leniency": leniency,
        **stop_flags(stop, k, head, h),
        **decode_flags(drafter, verifier, beta, tau, temperature, seed),
    }
    if show_rounds and json_lines:
        raise ConfigError("--json holds the rounds already; leave --show-rounds out")
    values = merge_values(config, overrides or (), flags)
    check_settings(GenerateConfig, values)
    settings = validate_settings(GenerateConfig, fill_from_run(values))
    texts = _given_texts(text, settings)
    quiet_libraries()
    from drafttrain.commands.generate import generate_texts

    display = "json" if json_lines else "rounds" if show_rounds else "text"
    generate_texts(settings, texts, display)


@app.command()
def export(
    overrides: Overrides = None,
    config: ConfigFile = None,
    drafter: Drafter = None,
    head: Annotated[
        str | None, typer.Option("--head", help="Folder of the acceptance head.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", help="A run of heads; its policy.json chooses one.")
    ] = None,
    h: Annotated[
        str | None,
        typer.Option("--h", metavar="FLOAT", help="Stop when a rejection is likelier than this."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The target's name in the model card.")
    ] = None,
    report: Annotated[
        str | None, typer.Option("--report", help="Measured numbers for the model card.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="The folder to write.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    license: Annotated[
        str | None, typer.Option("--license", help="The drafter's licence, as the Hub names it.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", help="Push the verified folder to USER/NAME on the Hub.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a drafter, its acceptance head and its stop policy as one folder.

    Transformers, vLLM and SGLang load the plain drafter from it; with custom_generate Transformers
    uses head and policy too. A fresh process loads the folder and compares it with the original,
    with 20 inputs decoded, before it gets its name.

    \b
    Examples:
      drafttrain export --drafter checkpoints/my-run/final --out my-drafter
      drafttrain export --drafter my-lm --head checkpoints/heads/final/D3-w6 --out my-drafter
      drafttrain export --drafter my-lm --heads checkpoints/heads --report tune.json --out mine
      drafttrain export --drafter checkpoints/my-run --out mine --license mit --push USER/NAME
    """
    flags = {
        "drafter": drafter,
        "head": head,
        "heads": heads,
        "h": h,
        "target": target,
        "report": report,
        "out": out,
        "force": force or None,
        "license": license,
        "push": push,
    }
    settings = load_settings(ExportConfig, config, overrides or (), flags)
    quiet_libraries()
    from drafttrain.commands.export import export as write_export

    write_export(settings)


@app.command()
def tune(
    overrides: Overrides = None,
    config: ConfigFile = None,
    heads: Annotated[
        str | None, typer.Option("--heads", help="A head's folder, or a run of heads.")
    ] = None,
    target: Target = None,
    drafter: Drafter = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Prompts to choose on; default: held-out ones.")
    ] = None,
    report_data: Annotated[
        str | None, typer.Option("--report-data", help="Prompts to report on, never to choose on.")
    ] = None,
    limit: Limit = None,
    report: Annotated[
        str | None, typer.Option("--report", help="JSON to write; its plot lies beside it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, load no weights.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Choose when to stop drafting: acceptance head, threshold, or a fixed length.

    Costs are measured on this machine; every prompt is decoded once, and its trace replayed under
    every policy. Writes a report and policy.json beside the heads. Without --heads: the newest run
    of heads in checkpoints/, on its own held-out prompts.

    \b
    Examples:
      drafttrain tune
      drafttrain tune --heads checkpoints/gsm8k-heads --report-data test.jsonl.gz
      drafttrain tune --heads checkpoints/gsm8k-heads --limit 100 max_draft=30 h=[0.5,0.6,0.7]
      drafttrain tune --heads my-head --target gpt2-xl --drafter gpt2 --data prompts.txt --dry-run
    """
    flags = {
        "heads": heads,
        "target.path": target,
        "drafter": drafter,
        "data.path": data,
        "data.limit": limit,
        "report_data.path": report_data,
        "report": report,
    }
    values = merge_values(config, overrides or (), flags)
    check_settings(TuneConfig, values)
    settings = validate_settings(TuneConfig, fill_from_heads(values))
    if settings.report is None:
        place = Path(str(settings.heads))
        run = head_run_of(place)
        file = (place if run is None else run.folder) / "tune.json"
        settings = settings.model_copy(update={"report": file})
    quiet_libraries()
    from drafttrain.commands import tune as tuning

    tuning.tune(settings, dry_run)


@app.command("tune-cascade")
def tune_cascade(
    overrides: Overrides = None,
    config: ConfigFile = None,
    target: Target = None,
    drafter: Annotated[
        str | None, typer.Option("--drafter", help="Folder or Hub name of the largest drafter.")
    ] = None,
    cascade: Cascade = None,
    data: Annotated[str | None, typer.Option("--data", help="Prompts to choose on.")] = None,
    report_data: Annotated[
        str | None, typer.Option("--report-data", help="Prompts to report on, never to choose on.")
    ] = None,
    limit: Limit = None,
    temperature: Temperature = None,
    leniency: Annotated[
        str | None,
        typer.Option("--leniency", metavar="FLOAT,FLOAT", help="Leniencies to try, from 1 on."),
    ] = None,
    seed: Seed = None,
    out: Annotated[
        str | None,
        typer.Option("--out", help="YAML to write; tune-cascade.json lies beside it."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be done, load no weights.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Find how much each drafter of a cascade should draft: its increments and leniency.

    Costs are measured on this machine. Candidates are replayed on recorded rows of all models, a
    few prompts first, the better half on more; the most tokens for the cost of all calls (SWI) win.

    \b
    Examples:
      drafttrain tune-cascade --target T --drafter LARGE --cascade max-gram --data dev.jsonl
      drafttrain tune-cascade --target T --drafter LARGE --cascade SMALL,max-gram \\
          --data dev.jsonl --report-data test.jsonl --leniency 1,1.5,3 --out cascade.yaml
      drafttrain tune-cascade --config tune.yaml --temperature 1 costs=parameters
      drafttrain eval --config cascade.yaml --data test.jsonl
    """
    flags = {
        "target.path": target,
        "drafter": drafter,
        "cascade": cascade,
        "data.path": data,
        "data.limit": limit,
        "report_data.path": report_data,
        "sampling.temperature": temperature,
        "sampling.seed": seed,
        "leniency": leniency,
        "out": out,
    }
    settings = load_settings(TuneCascadeConfig, config, overrides or (), flags)
    quiet_libraries()
    from drafttrain.commands import tune_cascade as tuning

    if dry_run:
        typer.echo(tuning.plan_search(settings))
    else:
        tuning.tune_cascade(settings)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command `drafttrain`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    run_command(app, "drafttrain", arguments or ["--help"])


def _given_texts(texts: list[str] | None, settings: GenerateConfig) -> list[str] | None:
    """Texts of --text or standard input; None where the inputs are settings.data."""
    if texts and settings.data is not None:
        raise ConfigError("--text and --data are both given; give one of them")
    if texts or settings.data is not None:
        return texts or None
    if sys.stdin.isatty():
        raise ConfigError("no inputs; add --text TEXT, --data FILE, or pipe lines in")
    try:
        lines = [line.rstrip("\r\n") for line in sys.stdin]
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input is not {error.encoding}: {error.reason} at byte {error.start}; "
            "convert it with iconv"
        ) from None
    if not lines:
        raise ConfigError("standard input is empty; pipe one text a line, or use --text or --data")
    return lines


if __name__ == "__main__":
    main()
