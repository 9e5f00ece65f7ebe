"""Files for llama.cpp, made by its own converter and quantizer as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from drafttrain.config.base import ConfigError
from drafttrain.config.engines import Engine
from drafttrain.config.serving import GgufConfig
from drafttrain.export.engines.checks import Pairing
from drafttrain.export.engines.serving import gguf_files

MAGIC = b"GGUF"
"""What every file of the format starts with."""
SHOWN = 200
"""Characters of a tool's own words in a message."""


def tools_are_there(pairing: Pairing, engine: Engine) -> None:
    """Converter and quantizer are files that can be run. Raises ConfigError."""
    gguf = pairing.gguf
    if gguf.converter is None:
        raise ConfigError(
            f"--for {engine.name}: the drafter becomes a GGUF file by llama.cpp's own converter; "
            "give --converter PATH of its convert_hf_to_gguf.py"
        )
    if gguf.quantise and gguf.quantizer is None:
        raise ConfigError(
            f"--quantise {','.join(gguf.quantise)} needs llama.cpp's llama-quantize; give "
            "--quantizer PATH"
        )
    tools = {"converter": gguf.converter, "quantizer": gguf.quantizer, "python": gguf.python}
    for name, tool in tools.items():
        if tool is None:
            continue
        if not tool.is_file():
            raise ConfigError(f"gguf.{name} = {str(tool)!r}: no such file; correct it")
        if tool.suffix != ".py" and not os.access(tool, os.X_OK):
            raise ConfigError(
                f"gguf.{name} = {str(tool)!r} is no program that can be run; correct it"
            )


def converter_knows(pairing: Pairing, engine: Engine) -> None:
    """The converter lists the drafter's architecture. Raises ConfigError."""
    assert pairing.gguf.converter is not None
    said = _run(
        [*_program(pairing.gguf.converter, pairing.gguf), "--print-supported-models"],
        "gguf.converter",
    )
    names = set(said.replace(",", " ").split())
    [own] = pairing.config.architectures or ["none"]
    if own not in names:
        raise ConfigError(
            f"--for {engine.name}: the converter {str(pairing.gguf.converter)!r} does not list "
            f"{own!r} among what it converts; take a newer llama.cpp, or leave {engine.name} out"
        )


def write_gguf(folder: Path, gguf: GgufConfig) -> None:
    """The files of `gguf_files`, into an exported folder. Raises ConfigError where a tool fails."""
    assert gguf.converter is not None
    first, *others = [folder / name for name in gguf_files(gguf)]
    arguments = [str(folder), "--outfile", str(first), "--outtype", gguf.outtype]
    _run([*_program(gguf.converter, gguf), *arguments], "gguf.converter", first)
    for kind, file in zip(gguf.quantise, others, strict=True):
        assert gguf.quantizer is not None
        arguments = [str(first), str(file), kind.upper()]
        _run([*_program(gguf.quantizer, gguf), *arguments], "gguf.quantizer", file)


def _program(tool: Path, gguf: GgufConfig) -> list[str]:
    own = [str(tool.absolute())]
    return [str(gguf.python or sys.executable), *own] if tool.suffix == ".py" else own


def _run(command: Sequence[str], setting: str, makes: Path | None = None) -> str:
    """What a tool says, once it has made a GGUF file, where it is to. Raises ConfigError."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ConfigError(f"{setting} could not be run ({error}); nothing was exported") from None
    if done.returncode != 0:
        words = [line for line in done.stdout.splitlines() if line.strip()]
        why = words[-1].strip()[:SHOWN] if words else f"exit code {done.returncode}"
        raise ConfigError(f"{setting} failed ({why}); nothing was exported")
    if makes is not None and not _is_gguf(makes):
        raise ConfigError(
            f"{setting} wrote no GGUF file {makes.name!r}; nothing was exported: give the tool of "
            "llama.cpp"
        )
    return done.stdout


def _is_gguf(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as content:
        return content.read(len(MAGIC)) == MAGIC
