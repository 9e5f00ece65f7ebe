"""Verify an export: a fresh process loads it and must find what was exported.

    python -m drafttrain.export.verify FOLDER REFERENCE

REFERENCE is a folder with the description of the original. The process describes what it loads from
FOLDER in the same way (`describe`) and, if there is a target, decodes with and without the drafter.
It prints one line of JSON, a `Verification`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, logging
from transformers.utils import ModelOutput

from drafttrain.build.method import AUTO, make_stop
from drafttrain.build.pairs import make_drafter
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import HEAD, POLICY, dump_policy, read_policy
from drafttrain.decoding.batching import run_single
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.types import Sampling, Source
from drafttrain.export.parts import Parts
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.drafters import (
    load_drafter,
    read_drafter_settings,
    reads_encoder,
    vocabulary_size,
)
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import cache_for_generate, load_target

INPUTS, LONGEST = 20, 256
"""Inputs that are decoded, and the most tokens of one that is used."""
TOKENS = 8
"""Length of the input on which logits are compared; every model takes as many."""
NEW_TOKENS = 32
"""Tokens drafted or decoded for an input."""
TIE = 1e-4
"""Top-2 logit gap of the target below which a greedy choice is a matter of rounding."""
DRAFTS = "the drafts"
REFERENCE, LOGITS = "reference.json", "logits.safetensors"


@dataclass(frozen=True)
class Check:
    """What to decode when an export is verified."""

    inputs: Sequence[Sequence[int]] = ()
    """Token ids, at most LONGEST each; random ones if there are none."""
    target: TargetConfig | None = None
    """The target to decode with; None: only drafts are compared."""


class Verification(BaseModel, frozen=True):
    """The result of loading an export again."""

    difference: str | None = None
    """The first difference, and what to do; None: there is none."""
    drafted: int = 0
    """Inputs whose drafts are those of the original drafter."""
    decoded: int = 0
    """Inputs for which the target with custom_generate and plain greedy decoding agree."""
    ties: int = 0
    """Those of them that agree up to a tie of the target's two best tokens."""


class Reference(BaseModel):
    """The original: its facts, and what is to be decoded."""

    facts: dict[str, Any]
    inputs: list[list[int]]
    target: TargetConfig | None


Reload = Callable[[Path, Path], Verification]
"""Function (export, reference folder) -> its verification: `in_fresh_process` or `compare`."""


def verify(folder: Path, parts: Parts, check: Check, reload: Reload) -> Verification:
    """Compare an export with its original. Raises ValueError naming the first difference."""
    inputs = [list(ids) for ids in check.inputs if len(ids) <= LONGEST][:INPUTS]
    if not inputs:  # random ones, the same every time, of 4 to 13 tokens
        drawn = torch.Generator().manual_seed(0)
        found = torch.randint(vocabulary_size(parts.drafter.config), (INPUTS, 13), generator=drawn)
        inputs = [ids[: 4 + row % 10] for row, ids in enumerate(found.tolist())]
    facts, logits = describe(parts, inputs)
    reference = Reference(facts=facts, inputs=inputs, target=check.target)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_file({LOGITS: logits}, place / LOGITS)
        (place / REFERENCE).write_text(reference.model_dump_json(), encoding="utf-8")
        found = reload(folder, place)
    if found.difference is not None:
        raise ValueError(f"nothing was exported: {found.difference}")
    return found


def in_fresh_process(folder: Path, reference: Path) -> Verification:
    """`compare` in a Python process of its own. Raises ValueError if the process fails."""
    command = [sys.executable, "-m", "drafttrain.export.verify", str(folder), str(reference)]
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


def load_written(folder: Path) -> Parts:
    """The parts of an export, from its files alone."""
    heads = load_heads(folder / HEAD) if (folder / HEAD).is_dir() else {}
    return Parts(
        drafter=load_drafter(folder, read_drafter_settings(str(folder))),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        head=next(iter(heads.values()), None),
        policy=read_policy(folder / POLICY),
    )


def compare(folder: Path, place: Path) -> Verification:
    """An export against the reference in a folder, `place`."""
    reference = Reference.model_validate_json((place / REFERENCE).read_text(encoding="utf-8"))
    parts = load_written(folder)
    facts, logits = describe(parts, reference.inputs)
    wrong = [name for name, fact in reference.facts.items() if facts[name] != fact]
    if not same_numbers(logits, load_file(place / LOGITS)[LOGITS]):
        wrong.append("the drafter's logits")
    if wrong:
        remedy = "load and save the drafter once with save_pretrained, and export that"
        return Verification(difference=f"{wrong[0]} changed while being written; {remedy}")
    found = Verification(drafted=len(facts[DRAFTS]))
    return found if reference.target is None else _decode(folder, reference, parts, found)


@torch.inference_mode()
def describe(parts: Parts, inputs: Sequence[Sequence[int]]) -> tuple[dict[str, Any], Tensor]:
    """What must be equal, as JSON values by their names in messages, and up to rounding: a language
    model's logits on tokens spread over the vocabulary, as source and as output. [T, V], else [1].
    """
    drafter, head = parts.drafter, parts.head
    logits, settings, generation = torch.zeros(1), None, None
    if drafter.can_generate():
        generation = drafter.generation_config.to_diff_dict() | {"transformers_version": None}
    if kind_of(drafter.config).runs_as_targets:
        ids = torch.arange(TOKENS)[None] * (vocabulary_size(drafter.config) - 1) // TOKENS + 1
        outputs = {"decoder_input_ids": ids} if drafter.config.is_encoder_decoder else {}
        logits = drafter(input_ids=ids, **outputs).logits[0].contiguous()
    else:  # our own class, whose settings are written as they are
        settings = drafter.config.to_diff_dict() | {"transformers_version": None}
    facts = {  # the drafts last: a drafter may change the layout of its weights
        "the drafter's weights": hash_weights(drafter),
        "config.json": settings,
        "generation_config.json": generation,
        "the tokenizer": hash_tokenizer(parts.tokenizer),
        "the vocabulary": parts.tokenizer.get_vocab(),
        "the acceptance head": None if head is None else hash_weights(head),
        POLICY: dump_policy(parts.policy),
        DRAFTS: some_drafts(parts, inputs),
    }
    return facts, logits


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to a few roundings of the largest: another layout may sum in another order."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    allowed = 32 * torch.finfo(ours.dtype).eps * float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= allowed


def some_drafts(parts: Parts, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The drafts for each input if every token is accepted, round after round; none of a drafter
    that cannot draft without its target."""
    model, config = parts.drafter, parts.drafter.config
    if kind_of(config).reads_target or reads_encoder(config):
        return []
    drafter, stop = make_drafter(model), make_stop(parts.policy.stop_config(), parts.head)
    found = []
    for ids in inputs:
        start = [config.decoder_start_token_id or 0] if config.is_encoder_decoder else ids
        source = Source.of_text(*(torch.tensor(own, device=model.device) for own in (ids, start)))
        randomness = SampledRandomness(torch.Generator(source.prefix.device).manual_seed(0))
        session = drafter.open(source, Sampling(), randomness)
        tokens, end = source.prefix, len(source.prefix) + NEW_TOKENS
        while (left := end - len(tokens)) > 0:
            proposal = run_single(session.propose(tokens, None, stop.capped(left)))
            if len(proposal.tokens) == 0:
                break
            tokens = torch.cat([tokens, proposal.tokens.to(tokens.device)])
        found.append(tokens[len(source.prefix) :].tolist())
    return found


def _decode(folder: Path, reference: Reference, parts: Parts, found: Verification) -> Verification:
    """The target with the folder's custom_generate, against the target alone, greedily.

    Under a lossy verifier the lossless one is compared: same drafter, same stops.
    """
    target = load_target(reference.target).model
    drafter = parts.drafter.to(target.device, target.dtype)
    lossless = parts.policy.model_copy(update={"verifier": AUTO})
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    options["num_return_sequences"] = 1
    ties = 0
    for row, ids in enumerate(reference.inputs):
        given = torch.tensor([ids], device=target.device)
        options |= {"input_ids": given, "attention_mask": torch.ones_like(given)}
        own = {"output_logits": True, "return_dict_in_generate": True}
        plain = target.generate(**options, **own, **cache_for_generate(target))
        speculated = target.generate(
            **options,
            assistant_model=drafter,
            policy=dump_policy(lossless),
            custom_generate=str(folder),
            trust_remote_code=True,  # a few lines, written by folder.py
        )[0]
        if torch.equal(plain.sequences[0], speculated):
            continue
        if gap_where_they_part(plain, speculated) >= TIE:
            return Verification(
                difference=f"custom_generate gives another output than the target alone for input "
                f"{row} of the check; see whether they agree in `drafttrain eval`, or set "
                "check=drafter"
            )
        ties += 1
    return found.model_copy(update={"decoded": len(reference.inputs), "ties": ties})


def gap_where_they_part(plain: ModelOutput, drafted: Tensor) -> float:
    """The top-2 logit gap of `generate`'s output where another one parts from it; infinite where
    they part before the first new token, or one is the beginning of the other. Shapes: [T]."""
    own = plain.sequences[0]
    shared = min(len(own), len(drafted))
    unequal = (own[:shared] != drafted[:shared]).nonzero()
    step = int(unequal[0]) - (len(own) - len(plain.logits)) if len(unequal) else -1
    if step < 0:
        return torch.inf
    best, second = plain.logits[step][0].float().topk(2).values.tolist()
    return best - second


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(compare(*map(Path, sys.argv[1:3])).model_dump_json())
