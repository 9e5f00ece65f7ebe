"""Write an export: under a temporary name, verified, then renamed into place.

    DIR/config.json, model.safetensors, tokenizer files, generation_config.json   the plain drafter
    DIR/acceptance_head/config.json, model.safetensors                            the head, if any
    DIR/policy.json                                       drafter, stop policy and verifier
    DIR/custom_generate/generate.py, requirements.txt        for Transformers, where it takes that
    DIR/README.md, report.png                                     the model card and its plot

The head never lies in the drafter's own file, nor next to it where a server's weight glob finds it:
whatever loads the folder sees an ordinary model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from drafttrain import __version__
from drafttrain.config.base import ConfigError
from drafttrain.config.policy import HEAD, POLICY, dump_policy
from drafttrain.data.shards.writing import check_writable, complete_files, only_writer
from drafttrain.export.parts import Parts
from drafttrain.export.verify import Check, Reload, Verification, verify

CUSTOM_GENERATE = "custom_generate"
ENTRY = "from drafttrain.export.generation import generate"
GENERATE = f'''"""Speculative decoding with this folder's drafter, policy and acceptance head."""

{ENTRY}

__all__ = ["generate"]
'''
PLOT = "report.png"
TRAPS = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a path that make vLLM take a plain drafter for one of another method."""


def check_name(name: str, field: str) -> None:
    """Refuse names that other programs take for something else. Raises ConfigError."""
    if trap := next((trap for trap in TRAPS if trap in name.lower()), None):
        raise ConfigError(
            f"{field} = {name!r}: vLLM takes any path with {trap!r} in it for another kind of "
            "drafter; choose another name"
        )


def check_destination(out: Path, force: bool) -> None:
    """Refuse a folder that may not be written. Raises ConfigError."""
    check_name(str(out.absolute()), "out")
    check_writable(out.absolute().parent, f"out = {str(out)!r}")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    code = out / CUSTOM_GENERATE / "generate.py"
    if not code.is_file() or ENTRY not in code.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(
            f"out = {str(out)!r} exists and is no earlier export; give the name of a new folder"
        )
    if not force:
        raise ConfigError(
            f"out = {str(out)!r} holds an earlier export; add --force to replace it, or give the "
            "name of a new folder"
        )


def write_export(
    out: Path,
    parts: Parts,
    card: Callable[[Verification], str],
    check: Check,
    reload: Reload,
    force: bool = False,
) -> Verification:
    """The whole folder or nothing; what was found on the way.

    force: replace an earlier export.

    Raises ConfigError as `check_destination` and where another process writes there, ValueError as
    `verify`, OSError where the folder cannot be written.
    """
    out = out.absolute()
    lock = only_writer(out.parent, "out", f".{out.name}.exporting.lock")
    holder, aside = places = [out.with_name(f".{out.name}{end}") for end in (".part", ".old")]
    try:
        _clean(out, *places)  # after an export that was killed
        check_destination(out, force)
        written = holder / out.name
        holder.mkdir()
        write_parts(written, parts)
        found = verify(written, parts, check, reload)
        (written / "README.md").write_text(card(found), encoding="utf-8")
        complete_files(written)
        if out.exists():
            out.rename(aside)
        written.rename(out)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"out = {str(out)!r} could not be written ({error}); nothing was exported"
        ) from error
    finally:
        _clean(out, *places)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
    return found


def _clean(out: Path, holder: Path, aside: Path) -> None:
    """Put an earlier export back if the new one did not take its place; remove everything else."""
    if aside.exists() and not out.exists():
        aside.rename(out)
    for folder in (holder, aside):
        shutil.rmtree(folder, ignore_errors=True)


def write_parts(folder: Path, parts: Parts) -> None:
    """Everything but the model card, into a new folder. Nothing in it says where it lies."""
    folder.mkdir()
    parts.drafter.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings |= older_rope_names(settings)
    text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    parts.tokenizer.save_pretrained(folder)
    if parts.head is not None:
        parts.head.save_pretrained(folder / HEAD)
    policy = json.dumps(dump_policy(parts.policy), indent=2, ensure_ascii=False) + "\n"
    (folder / POLICY).write_text(policy, encoding="utf-8")
    if parts.plot is not None:
        shutil.copyfile(parts.plot, folder / PLOT)
    code = folder / CUSTOM_GENERATE
    code.mkdir()
    (code / "generate.py").write_text(GENERATE, encoding="utf-8")
    (code / "requirements.txt").write_text(f"drafttrain>={__version__}\n", encoding="utf-8")


def older_rope_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's entries of config.json under the names of Transformers 4.

    Transformers 5 writes `rope_parameters` only. Programs that pin Transformers 4 read
    `rope_theta`, `partial_rotary_factor` and `rope_scaling`, and silently take a base of 10,000
    without them. Empty without rotary embeddings, and where each type of layers has its own.
    """
    rope = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {}
    outside = ("rope_theta", "partial_rotary_factor")
    names = {name: rope[name] for name in outside if name in rope}
    if rope.get("rope_type", "default") != "default":
        names["rope_scaling"] = {name: rope[name] for name in rope if name not in outside}
    return {name: value for name, value in names.items() if name not in config}
