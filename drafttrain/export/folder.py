"""Writes an export under a temporary name, verifies it and renames it into place.

    DIR/config.json, model.safetensors, tokenizer files, generation_config.json   the plain drafter
    DIR/acceptance_head/config.json, model.safetensors                            the head, if any
    DIR/policy.json                                       drafter, stop policy and verifier
    DIR/custom_generate/generate.py, requirements.txt        for Transformers' `generate`
    DIR/README.md, report.png                                     the model card and its plot

The head is in a separate folder, where a server's search for weight files does not find it, so any
program that loads the exported folder sees an ordinary model.
"""

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
TRAPS = ("eagle-", "eagle3", "dflash", "dspark")
"""Substrings of a path that make vLLM mistake a plain drafter for another method's drafter."""


def check_name(name: str, field: str) -> None:
    """Raises ConfigError for a name that vLLM would mistake for another method's drafter."""
    for trap in TRAPS:
        if trap in name.lower():
            raise ConfigError(
                f"{field} = {name!r}: vLLM would mistake a path that contains {trap!r} for another "
                "kind of drafter; choose another name"
            )


def check_destination(out: Path, force: bool) -> None:
    """Raises ConfigError if the folder may not be written.

    It must not exist, be empty, or be an earlier export with force = true.
    """
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
            f"out = {str(out)!r} is an earlier export; add --force to replace it, or give the "
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
    """Writes the complete folder, or nothing if any step fails; returns the verification.

    card: makes the text of README.md. force: replaces an earlier export. Raises ConfigError as
    `check_destination` does and if another process writes there, ValueError as `verify` does, and
    OSError if the folder cannot be written.
    """
    out = out.absolute()
    lock = only_writer(out.parent, "out", f".{out.name}.exporting.lock")
    holder, aside = [out.with_name(f".{out.name}{end}") for end in (".part", ".old")]
    try:
        _clean(out, holder, aside)  # after an export that was killed
        check_destination(out, force)
        written = holder / out.name
        holder.mkdir()
        write_parts(written, parts)
        verification = verify(written, parts, check, reload)
        (written / "README.md").write_text(card(verification), encoding="utf-8")
        complete_files(written)
        if out.exists():
            out.rename(aside)
        written.rename(out)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"out = {str(out)!r} could not be written ({error}); nothing was exported"
        ) from error
    finally:
        _clean(out, holder, aside)
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
    return verification


def _clean(out: Path, holder: Path, aside: Path) -> None:
    """Restores an earlier export that was not replaced; removes the temporary folders."""
    if aside.exists() and not out.exists():
        aside.rename(out)
    for folder in (holder, aside):
        shutil.rmtree(folder, ignore_errors=True)


def write_parts(folder: Path, parts: Parts) -> None:
    """Writes everything except the model card into a new folder. No file contains its path."""
    folder.mkdir()
    parts.drafter.save_pretrained(folder)
    config = folder / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings |= older_rope_names(settings)
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    parts.tokenizer.save_pretrained(folder)
    if parts.head is not None:
        parts.head.save_pretrained(folder / HEAD)
    policy = json.dumps(dump_policy(parts.policy), indent=2, ensure_ascii=False) + "\n"
    (folder / POLICY).write_text(policy, encoding="utf-8")
    if parts.plot is not None:
        shutil.copyfile(parts.plot, folder / "report.png")
    code = folder / CUSTOM_GENERATE
    code.mkdir()
    (code / "generate.py").write_text(GENERATE, encoding="utf-8")
    (code / "requirements.txt").write_text(f"drafttrain>={__version__}\n", encoding="utf-8")


def older_rope_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary embedding's entries of config.json under their Transformers 4 names.

    Transformers 5 writes only `rope_parameters`. Programs that pin Transformers 4 read
    `rope_theta`, `partial_rotary_factor` and `rope_scaling`; without them they silently use a base
    of 10,000. Empty without rotary embeddings or if layer types have different ones.
    """
    rope = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        return {}
    outside = ("rope_theta", "partial_rotary_factor")
    names = {name: rope[name] for name in outside if name in rope}
    if rope.get("rope_type", "default") != "default":
        names["rope_scaling"] = {name: rope[name] for name in rope if name not in outside}
    return {name: value for name, value in names.items() if name not in config}
