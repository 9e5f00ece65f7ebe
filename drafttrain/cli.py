"""The command `drafttrain`: one function per verb, with options that map to settings.

Heavy modules are imported only after the settings have been checked.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from drafttrain import __version__
from drafttrain.commands.options import Debug, DryRun, takes_settings
from drafttrain.commands.shell import TYPER_STYLE, call, run_command
from drafttrain.config.base import ConfigError
from drafttrain.config.commands import (
    BigramsConfig,
    CacheConfig,
    DistillConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    TuneConfig,
)
from drafttrain.config.inputs import STDIN
from drafttrain.config.runs import fill_eval, fill_generate, fill_tune
from drafttrain.config.sweep import expand_sweep

app = typer.Typer(**TYPER_STYLE)


def named(text: str) -> dict[str, str]:
    """Returns the options of settings: `NAME=SETTING`, or the last part of the setting's name."""
    pairs = (word.rpartition("=")[::2] for word in text.split())
    own = {name or setting.rpartition(".")[2].replace("_", "-"): setting for name, setting in pairs}
    return {f"--{name}": setting for name, setting in own.items()}


TARGET = named("target=target.path")
DATA = named("data=data.path data.limit")
SAMPLING = named("sampling.temperature sampling.max_new_tokens sampling.seed")
METHOD = named(
    "policy decode.drafter tree=decode.tree.kind cascade=decode.cascade.drafters "
    "decode.cascade.increments decode.cascade.leniency decode.stop.k stop=decode.stop.kind "
    "decode.stop.head decode.stop.h verifier=decode.verifier.kind decode.verifier.beta "
    "decode.verifier.tau decode.sampling.temperature decode.sampling.max_new_tokens "
    "decode.sampling.seed"
)


def print_version(wanted: bool) -> None:
    """Prints the version and exits, if wanted."""
    if wanted:
        print(f"drafttrain {__version__}")
        raise typer.Exit


@app.callback()
def drafttrain(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Train, measure and export drafters for speculative decoding.

    A drafter proposes several tokens, and the target checks them in one forward pass.

    \b
    Examples:
      drafttrain distill --target t5-small --data texts.txt --out shards
      drafttrain train seq2seq target.path=t5-small data.path=texts.txt ...
      drafttrain eval
      drafttrain generate --text "the house is small" --show-rounds
    """


@app.command()
@takes_settings(
    DistillConfig, TARGET | DATA | named("out method backend server=server.url") | SAMPLING
)
def distill(settings: DistillConfig, dry_run: DryRun = False) -> None:
    """Generate training data with the target: Parquet shards with a manifest.

    Targets are encoder-decoder (T5, BART, ...) or decoder-only (Llama, Qwen, GPT-2, ...).
    Running it again continues where it stopped.

    \b
    Examples:
      drafttrain distill --target t5-small --data texts.txt.gz --out shards
      drafttrain distill --target gpt2 --data prompts.jsonl --out shards \\
          --method sample --temperature 1 sampling.top_k=50
      drafttrain distill --target Qwen/Qwen3-0.6B --data questions.txt \\
          --out shards data.chat=true --server http://localhost:8000/v1
      accelerate launch -m drafttrain distill --config distill.yaml
    """
    if dry_run:
        print(call("drafttrain.data.distill.plan:plan_distillation", settings).text)
    else:
        call("drafttrain.data.distill.distill:distill", settings)


@app.command()
@takes_settings(CacheConfig, TARGET | named("drafter distilled out mixing dtype seed"))
def cache(settings: CacheConfig, dry_run: DryRun = False) -> None:
    """Compute the training data of acceptance heads: hidden states of a drafter with labels.

    Running it again continues where it stopped.

    \b
    Examples:
      drafttrain cache --target gpt2-large --drafter gpt2 --distilled shards \\
          --out cache --dry-run
      accelerate launch -m drafttrain cache --config cache.yaml
    """
    if dry_run:
        print(call("drafttrain.data.hidden.cache:plan_cache", settings))
    else:
        call("drafttrain.data.hidden.cache:build_cache", settings)


@app.command()
@takes_settings(BigramsConfig, named("distilled out"))
def bigrams(settings: BigramsConfig) -> None:
    """Count the most frequent next token of each token in a target's outputs, for Max-Gram.

    \b
    Examples:
      drafttrain bigrams --distilled shards --out bigrams.safetensors
      drafttrain eval --target t5-small --drafter max-gram --data test.txt \\
          decode.bigrams=bigrams.safetensors
    """
    call("drafttrain.data.bigrams:write_bigrams", settings)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name or YAML file.")] = "--help",
) -> None:
    """Train a drafter or acceptance heads; distil the target first if needed: RECIPE KEY=VALUE ...

    The same as `accelerate launch recipes/train_NAME.py` with one process. RECIPE is a YAML file of
    settings, the name of one in recipes/, or the name of a script there with --config FILE.
    Running it again continues where it stopped. `drafttrain train RECIPE --help` shows its options.

    \b
    Examples:
      drafttrain train quickstart --dry-run
      drafttrain train recipes/seq2seq.yaml run=RUN target.path=T5 data.path=train.txt
      drafttrain train causal-drafter --config mine.yaml train.epochs=2
      accelerate launch -m drafttrain train quickstart
    """
    if recipe in ("-h", "--help"):
        print(context.get_help())
        return
    debug = ["--debug"] if context.obj else []  # run_command has removed it
    call("drafttrain.commands.train:run_recipe", recipe, [*context.args, *debug])


@app.command("eval")
@takes_settings(
    EvalConfig,
    TARGET | DATA | named("report mode sweep batch-size=batch_sizes") | METHOD,
    fill_eval,
)
def evaluate(settings: EvalConfig, dry_run: DryRun = False) -> None:
    """Measure a drafter: mean acceptance length, speedup over plain decoding, output quality.

    Without --target and --drafter: the newest run in checkpoints/, on its held-out rows.

    \b
    Examples:
      drafttrain eval
      drafttrain eval --drafter checkpoints/my-run --data test.txt --limit 200
      drafttrain eval --sweep k=5,10,15,25 --sweep beta=3,5 --sweep tau=1,2
      drafttrain eval --head HEAD --sweep k=2,4,6,8 --sweep h=0.3,0.5,0.7
      drafttrain eval --batch-size 1,4,16 --sweep k=3,5,10
    """
    expand_sweep(settings.decode, settings.sweep)  # refuses wrong values before torch is imported
    call("drafttrain.commands.eval:measure", settings, dry_run)


@app.command()
@takes_settings(
    GenerateConfig, TARGET | DATA | named("data.chat batch_size") | METHOD, fill_generate
)
def generate(
    settings: GenerateConfig,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="TEXT", help="An input; may be repeated.")
    ] = None,
    show_rounds: Annotated[
        bool, typer.Option("--show-rounds", help="Show drafted and accepted tokens of each round.")
    ] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per input, with all rounds.")
    ] = False,
) -> None:
    """Decode texts and print tokens as they are accepted.

    Inputs are --text, --data or the lines of standard input. Without --target and --drafter: the
    newest run in checkpoints/.

    \b
    Examples:
      drafttrain generate --text "the house is small" --show-rounds
      drafttrain generate --drafter DRAFTER --batch-size 8 < texts.txt
      drafttrain generate --target t5-small --drafter none --data texts.txt --json
      drafttrain generate --drafter checkpoints/my-run --chat --text "Say hello."
    """
    if show_rounds and json_lines:
        raise ConfigError("--json already includes the rounds; leave --show-rounds out")
    display = "json" if json_lines else "rounds" if show_rounds else "text"
    if text and settings.data.path != STDIN:
        raise ConfigError("--text and --data are both given; give one of them")
    if not text and settings.data.path == STDIN:
        text = [] if sys.stdin.isatty() else [line.rstrip("\r\n") for line in sys.stdin]
        if not text:
            raise ConfigError("no inputs; add --text TEXT or --data FILE, or pipe in texts")
    call("drafttrain.commands.generate:generate_texts", settings, text or None, display)


@app.command()
@takes_settings(
    ExportConfig, named("drafter head target=target.path report out for=engines force license hub")
)
def export(settings: ExportConfig) -> None:
    """Write a drafter, its acceptance head and its stop policy as one folder.

    Transformers, vLLM, SGLang, TensorRT-LLM and llama.cpp load the plain drafter from it; with
    custom_generate Transformers also uses head and policy. --for checks the requirements of each
    program and prints its command. Before the folder gets its final name, a new process loads it,
    compares it with the original and decodes 20 inputs.

    \b
    Examples:
      drafttrain export --drafter checkpoints/my-run/final --out my-drafter
      drafttrain export --drafter my-lm --head checkpoints/heads \\
          --report tune.json --out mine
      drafttrain export --drafter LM --target T --out mine --for vllm,sglang
      drafttrain export --drafter checkpoints/my-run --out mine \\
          --license mit --hub USER/NAME
    """
    call("drafttrain.commands.export:export", settings)


@app.command()
@takes_settings(
    TuneConfig,
    named("heads target=target.path drafter data=data.path data.limit report-data=report_data.path")
    | named("batch-size=batch_sizes minutes sweep")
    | SAMPLING
    | named("report write"),
    fill_tune,
)
def tune(settings: TuneConfig, dry_run: DryRun = False) -> None:
    """Choose the fastest drafting method: draft length, stop policy, head, tree and verifier.

    Decodes your prompts with all candidates in turn, drops the slower half and decodes twice as
    many prompts with the rest. The final figures come from other prompts. Writes a report, an HTML
    page and the policy; with --write, generate, eval and export use the policy.
    Without --heads: the newest run of heads in checkpoints/, on its held-out prompts.

    \b
    Examples:
      drafttrain tune
      drafttrain tune --heads checkpoints/gsm8k-heads --minutes 10 \\
          --batch-size 4,16 --sweep h=0.5,0.6,0.7 trees=[]
      drafttrain tune --drafter LARGE --target T --data dev.jsonl \\
          candidates.deep.cascade.drafters=SMALL,max-gram
    """
    call("drafttrain.commands.tune:tune", settings, dry_run)


@app.command()
def convert(
    model: Annotated[str, typer.Option("--model", help="Folder or Hub name.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    revision: Annotated[str | None, typer.Option("--revision", help="Revision on the Hub.")] = None,
    debug: Debug = False,
) -> None:
    """Convert a model with pickled weights (pytorch_model.bin) to safetensors.

    Torch loads them with weights_only, so no code in the files is run.

    \b
    Examples:
      drafttrain convert --model Helsinki-NLP/opus-mt-en-de --out opus-mt-en-de
    """
    call("drafttrain.data.convert:convert", model, out, revision)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command `drafttrain`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    run_command(app, "drafttrain", arguments or ["--help"])


if __name__ == "__main__":
    main()
