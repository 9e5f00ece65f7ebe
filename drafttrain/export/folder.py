"""Write an export: under a temporary name, verified, then renamed into place.

    DIR/config.json, model.safetensors, tokenizer files, generation_config.json   the plain drafter
    DIR/acceptance_head/config.json, model.safetensors                            the head, if any
    DIR/policy.json                                                               when to stop
    DIR/custom_generate/generate.py, requirements.txt                             for Transformers
    DIR/README.md                                                                 the model card

The head never lies in the drafter's own file, nor beside it where a server's weight glob finds it:
whatever loads the folder sees an ordinary model.
"""

from __future__ import annotations

import copy
import os
import shutil
from importlib.metadata import version
from pathlib import Path

from drafttrain.config import ConfigError
from drafttrain.export.parts import Parts
from drafttrain.export.policy import HEAD, POLICY, write_policy
from drafttrain.export.verify import verify

CUSTOM_GENERATE = "custom_generate"
ENTRY = "from drafttrain.export.generation import generate"
GENERATE = f'''"""Speculative decoding with this folder's drafter, policy and acceptance head."""

{ENTRY}

__all__ = ["generate"]
'''
TRAPS = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a path that make vLLM take a plain drafter for one of another method."""


def check_destination(out: Path, force: bool) -> None:
    """Refuse a folder that may not be written. Raises ConfigError."""
    path = str(out.absolute())
    trap = next((trap for trap in TRAPS if trap in path.lower()), None)
    if trap is not None:
        raise ConfigError(
            f"out = {str(out)!r}: vLLM takes any path with {trap!r} in it for another kind of "
            "drafter; choose another name"
        )
    nearest = next(parent for parent in out.absolute().parents if parent.exists())
    if not nearest.is_dir():
        raise ConfigError(f"out = {str(out)!r}: {str(nearest)!r} is a file, not a folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_export(out):
        raise ConfigError(
            f"out = {str(out)!r} exists and is no earlier export; give the name of a new folder"
        )
    if not force:
        raise ConfigError(
            f"out = {str(out)!r} holds an earlier export; add --force to replace it, or give the "
            "name of a new folder"
        )


def is_export(folder: Path) -> bool:
    """Whether this program wrote the folder."""
    file = folder / CUSTOM_GENERATE / "generate.py"
    return file.is_file() and ENTRY in file.read_text(encoding="utf-8", errors="replace")


def write_export(out: Path, parts: Parts, card: str, force: bool = False) -> None:
    """The whole folder or nothing. Raises ConfigError as `check_destination`, ValueError as
    `verify`."""
    check_destination(out, force)
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}-{os.getpid()}.part")
    try:
        write_parts(temporary, parts)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        verify(temporary, parts)
        _put_in_place(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_parts(folder: Path, parts: Parts) -> None:
    """Everything but the model card, into a new folder."""
    folder.mkdir()
    parts.drafter.save_pretrained(folder)
    if parts.drafter.can_generate():
        config = copy.deepcopy(parts.drafter.generation_config)
        config.update(
            num_assistant_tokens=parts.assisted.tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=parts.assisted.confidence,
        )
        config.save_pretrained(folder)
    parts.tokenizer.save_pretrained(folder)
    if parts.head is not None:
        parts.head.save_pretrained(folder / HEAD)
    write_policy(parts.policy, folder / POLICY)
    code = folder / CUSTOM_GENERATE
    code.mkdir()
    (code / "generate.py").write_text(GENERATE, encoding="utf-8")
    requirement = f"drafttrain>={version('drafttrain')}\n"
    (code / "requirements.txt").write_text(requirement, encoding="utf-8")


def _put_in_place(temporary: Path, out: Path) -> None:
    """Rename; an earlier export is moved aside first, and comes back should the rename fail."""
    aside = out.with_name(f".{out.name}-{os.getpid()}.old")
    replaced = out.exists()
    if replaced:
        out.rename(aside)
    try:
        temporary.rename(out)
    except OSError:
        if replaced:
            aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
