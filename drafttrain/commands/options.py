"""Options that commands share, and the settings that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

# Numbers are text here: their types are those of the settings, which also word the errors.
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of settings.")]
Target = Annotated[
    str | None, typer.Option("--target", help="Hub name or folder of the target model.")
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Folder or Hub name of the drafter; max-gram: copy from the text itself, without "
        "training; none: plain decoding.",
    ),
]
Data = Annotated[
    str | None, typer.Option("--data", help="Inputs: Hub name, file (txt, jsonl, ...) or folder.")
]
Limit = Annotated[str | None, typer.Option("--limit", metavar="INT", help="Most rows to use.")]
DraftLength = Annotated[
    str | None, typer.Option("--k", metavar="INT", help="Tokens drafted in a round.")
]
StopKind = Annotated[
    str | None,
    typer.Option(
        "--stop", help="fixed (k), head, entropy, confidence (greedy only) or gain (opt-tree)."
    ),
]
Head = Annotated[
    str | None, typer.Option("--head", help="Folder of the acceptance head, for --stop head.")
]
Threshold = Annotated[
    str | None,
    typer.Option(
        "--h", metavar="FLOAT", help="--stop head: stop when a rejection is likelier than this."
    ),
]
Seed = Annotated[
    str | None, typer.Option("--seed", metavar="INT", help="Seed of every random choice.")
]
Temperature = Annotated[
    str | None,
    typer.Option("--temperature", metavar="FLOAT", help="0: greedy; above: sampling."),
]
VerifierKind = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="auto, greedy, rejection, k-seq, multi-round, recursive, target-walk (lossless), or "
        "spec-verification (lossy).",
    ),
]
Beta = Annotated[
    str | None,
    typer.Option(
        "--beta", metavar="INT", help="Spec-Verification: among the target's top beta tokens."
    ),
]
Tau = Annotated[
    str | None,
    typer.Option(
        "--tau", metavar="FLOAT", help="Spec-Verification: largest log-probability gap to the top."
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="KIND",
        help="Draft trees: paths, rsd-c, rsd-s, opt-tree, binary, eagle, sequoia (docs/trees.md).",
    ),
]
Cascade = Annotated[
    str | None,
    typer.Option(
        "--cascade",
        metavar="NAME,NAME",
        help="Smaller drafters behind --drafter, from the largest down to max-gram.",
    ),
]
Increments = Annotated[
    str | None,
    typer.Option(
        "--increments",
        metavar="INT,INT/INT",
        help="--cascade: tokens of each drafter in a round / in reviews; `drafttrain tune-cascade` "
        "finds them.",
    ),
]
Leniency = Annotated[
    str | None,
    typer.Option(
        "--leniency", metavar="FLOAT", help="--cascade: how lenient reviews inside are (from 1)."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
"""Read by run_command before the command itself runs; declared to be listed in the help."""
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any other setting, as data.split=test."),
]


def stop_flags(stop: str | None, k: str | None, head: str | None, h: str | None) -> dict[str, Any]:
    return {
        "decode.stop.kind": stop,
        "decode.stop.k": k,
        "decode.stop.head": head,
        "decode.stop.h": h,
    }


def decode_flags(
    drafter: str | None,
    verifier: str | None,
    beta: str | None,
    tau: str | None,
    temperature: str | None,
    seed: str | None,
) -> dict[str, Any]:
    return {
        "decode.drafter": drafter,
        "decode.verifier.kind": verifier,
        "decode.verifier.beta": beta,
        "decode.verifier.tau": tau,
        "decode.sampling.temperature": temperature,
        "decode.sampling.seed": seed,
    }
