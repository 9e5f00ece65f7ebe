"""An export is done when a fresh process has loaded all of it and found the same.

Compared are weights, logits, tokenizer, vocabulary, head, policy, the drafts for 20 inputs, and,
where there is a target to decode with, its outputs for them with and without the drafter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from drafttrain.build.stops import make_stop
from drafttrain.config.inputs import TargetConfig
from drafttrain.export.parts import Parts
from drafttrain.export.reload import (
    FACTS,
    TENSORS,
    Facts,
    Verification,
    some_drafts,
    some_logits,
    some_predictions,
    vocabulary_size,
)
from drafttrain.models.identity import hash_tokenizer, hash_weights

INPUTS = 20
"""Inputs that are decoded."""
LONGEST = 256
"""Longer inputs are not used for the check."""

Reload = Callable[[Path, Path], Verification]
"""Export and reference folders -> what was found."""


@dataclass(frozen=True)
class Check:
    """What to decode when an export is verified."""

    inputs: Sequence[Sequence[int]] = ()
    """Token ids, at most LONGEST each; random ones where there are none."""
    target: TargetConfig | None = None
    """The target to decode with; None: only drafts are compared."""


def verify(folder: Path, parts: Parts, check: Check, reload: Reload) -> Verification:
    """Compare an export with what it was made from. Raises ValueError naming what differs."""
    with tempfile.TemporaryDirectory() as place:
        write_reference(Path(place), parts, check)
        found = reload(folder, Path(place))
    if found.differences:
        raise ValueError(f"nothing was exported: {found.differences[0]}")
    return found


def write_reference(place: Path, parts: Parts, check: Check) -> None:
    """What the parts are, for `reload.compare`."""
    inputs = [list(ids) for ids in check.inputs if len(ids) <= LONGEST][:INPUTS]
    inputs = inputs or random_inputs(vocabulary_size(parts.drafter))
    # before anything is drafted: a drafter may lay its weights out anew
    tensors = {"logits": some_logits(parts.drafter).contiguous()}
    if parts.head is not None:
        tensors["head"] = some_predictions(parts.head).contiguous()
    stop = make_stop(parts.policy.stop_config(), parts.head)
    facts = Facts(
        weights=hash_weights(parts.drafter),
        head=None if parts.head is None else hash_weights(parts.head),
        tokenizer=hash_tokenizer(parts.tokenizer),
        vocabulary=parts.tokenizer.get_vocab(),
        assisted=asdict(parts.assisted) if parts.drafter.can_generate() else None,
        policy=parts.policy,
        inputs=inputs,
        drafts=some_drafts(parts.drafter, stop, inputs),
        target=check.target,
    )
    (place / FACTS).write_text(facts.model_dump_json(), encoding="utf-8")
    save_file(tensors, place / TENSORS)


def random_inputs(vocabulary: int) -> list[list[int]]:
    """Inputs of 4 to 13 random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(vocabulary, (4 + row % 10,), generator=generator).tolist()
        for row in range(INPUTS)
    ]


def in_fresh_process(folder: Path, reference: Path) -> Verification:
    """`reload.compare` in a Python process of its own. Raises ValueError where that fails."""
    command = [sys.executable, "-m", "drafttrain.export.reload", str(folder), str(reference)]
    settings = {
        "HF_MODULES_CACHE": str(reference / "modules"),  # not among the user's own
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(
            f"nothing was exported: a fresh process could not load or use it ({said[-1]}); "
            "check=drafter leaves the target out of this check"
        )
    return Verification.model_validate_json(done.stdout.strip().splitlines()[-1])
