"""Verifies an export: a new process loads it and compares it with the original.

    python -m drafttrain.export.verify FOLDER REFERENCE

REFERENCE is a folder with a description of the original (`describe`). The process describes the
export in FOLDER in the same way and, if there is a target, decodes with and without the drafter.
It prints a `Verification` as one line of JSON.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from pydantic_core import from_json, to_json
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
"""Maximal number of inputs to decode; maximal length of an input in tokens."""
TOKENS = 8
"""Length of the input for comparing logits, short enough for every model."""
NEW_TOKENS = 32
"""Tokens that are drafted or decoded for each input."""
TIE = 1e-4
"""Gap between the target's two largest logits below which rounding may change the argmax."""
DRAFTS = "the drafts"
REFERENCE, LOGITS = "reference.json", "logits.safetensors"


class Check(NamedTuple):
    """The inputs and target for verifying an export."""

    inputs: Sequence[Sequence[int]] = ()
    """Token ids; inputs longer than LONGEST are left out. Random inputs if none is left."""
    target: TargetConfig | None = None
    """The target to decode with; None: only the drafter's output is compared."""


class Verification(BaseModel, frozen=True):
    """The result of verifying an export."""

    difference: str | None = None
    """The first difference and its remedy; None if there is no difference."""
    drafted: int = 0
    """Number of inputs for which original and export draft the same tokens."""
    decoded: int = 0
    """Number of inputs for which custom_generate and plain greedy decoding agree."""
    ties: int = 0
    """Number of those that agree only up to a tie of the target's two best tokens."""


class Reference(BaseModel):
    """A description of the original and the inputs to decode, written to a file."""

    facts: dict[str, Any]
    inputs: list[list[int]]
    target: TargetConfig | None


Reload = Callable[[Path, Path], Verification]
"""Function (export, reference folder) -> verification: `in_fresh_process` or `compare`."""


def verify(folder: Path, parts: Parts, check: Check, reload: Reload) -> Verification:
    """Compares an export with its original. Raises ValueError naming the first difference."""
    inputs = [list(ids) for ids in check.inputs if len(ids) <= LONGEST][:INPUTS]
    if not inputs:  # random inputs of 4 to 13 tokens, the same on every run
        drawn = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary_size(parts.drafter.config), (INPUTS, 13), generator=drawn)
        inputs = [row[: 4 + i % 10] for i, row in enumerate(ids.tolist())]
    facts, logits = describe(parts, inputs)
    reference = Reference(facts=facts, inputs=inputs, target=check.target)
    with tempfile.TemporaryDirectory() as name:
        described = Path(name)
        save_file({LOGITS: logits}, described / LOGITS)
        (described / REFERENCE).write_text(reference.model_dump_json(), encoding="utf-8")
        verification = reload(folder, described)
    if verification.difference is not None:
        raise ValueError(f"nothing was exported: {verification.difference}")
    return verification


def in_fresh_process(folder: Path, reference: Path) -> Verification:
    """Runs `compare` in a new Python process. Raises ValueError if the process fails."""
    command = [sys.executable, "-m", "drafttrain.export.verify", str(folder), str(reference)]
    settings = {
        "HF_MODULES_CACHE": str(reference / "modules"),  # not the user's cache
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    if done.returncode != 0:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(
            f"nothing was exported: a new process could not load or use it ({errors[-1]}); "
            "check=drafter leaves the target out of this check"
        )
    return Verification.model_validate_json(done.stdout.strip().splitlines()[-1])


def load_written(folder: Path) -> Parts:
    """Loads the parts of an export from its files."""
    heads = load_heads(folder / HEAD) if (folder / HEAD).is_dir() else {}
    return Parts(
        drafter=load_drafter(folder, read_drafter_settings(str(folder))),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        head=next(iter(heads.values()), None),
        policy=read_policy(folder / POLICY),
    )


def compare(folder: Path, described: Path) -> Verification:
    """Compares the export in a folder with the description of the original in another folder."""
    reference = Reference.model_validate_json((described / REFERENCE).read_text(encoding="utf-8"))
    parts = load_written(folder)
    facts, logits = describe(parts, reference.inputs)
    wrong = [name for name, fact in reference.facts.items() if facts[name] != fact]
    if not same_numbers(logits, load_file(described / LOGITS)[LOGITS]):
        wrong.append("the drafter's logits")
    if wrong:
        remedy = "load and save the drafter once with save_pretrained, and export the saved folder"
        return Verification(difference=f"{wrong[0]} changed while being written; {remedy}")
    result = Verification(drafted=len(facts[DRAFTS]))
    return result if reference.target is None else _decode(folder, reference, parts, result)


@torch.inference_mode()
def describe(parts: Parts, inputs: Sequence[Sequence[int]]) -> tuple[dict[str, Any], Tensor]:
    """Returns facts that must be equal in original and export, and logits that may round otherwise.

    The facts are JSON values by their names in messages. The logits [T, V] are those of T = TOKENS
    token ids spread over the vocabulary, as source and as output; [1] zero for drafters that are
    not plain language models.
    """
    drafter, head = parts.drafter, parts.head
    logits, settings, generation = torch.zeros(1), None, None
    if drafter.can_generate():
        generation = drafter.generation_config.to_diff_dict() | {"transformers_version": None}
    if kind_of(drafter.config).runs_as_targets:
        ids = torch.arange(TOKENS)[None] * (vocabulary_size(drafter.config) - 1) // TOKENS + 1
        outputs = {"decoder_input_ids": ids} if drafter.config.is_encoder_decoder else {}
        logits = drafter(input_ids=ids, **outputs).logits[0].contiguous()
    else:  # a drafttrain class, whose settings are written unchanged
        settings = drafter.config.to_diff_dict() | {"transformers_version": None}
    facts = {  # drafts last, because drafting may change the layout of the weights
        "the drafter's weights": hash_weights(drafter),
        "config.json": settings,
        "generation_config.json": generation,
        "the tokenizer": hash_tokenizer(parts.tokenizer),
        "the vocabulary": parts.tokenizer.get_vocab(),
        "the acceptance head": None if head is None else hash_weights(head),
        POLICY: dump_policy(parts.policy),
        DRAFTS: draft_all(parts, inputs),
    }
    # as they are read from JSON, which has no numbers as keys (BART's id2label) and no infinity
    return from_json(to_json(facts, inf_nan_mode="null")), logits


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Compares logits up to rounding of the largest, as other layouts may sum in another order."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    allowed = 32 * torch.finfo(ours.dtype).eps * float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= allowed


def draft_all(parts: Parts, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns NEW_TOKENS draft tokens for each input, as if every draft were accepted.

    A draft may end earlier if the drafter proposes none. Empty for drafters that cannot draft
    without their target.
    """
    model, config = parts.drafter, parts.drafter.config
    if kind_of(config).reads_target or reads_encoder(config):
        return []
    drafter, stop = make_drafter(model), make_stop(parts.policy.stop_config(), parts.head)
    drafts = []
    for ids in inputs:
        start = [config.decoder_start_token_id or 0] if config.is_encoder_decoder else ids
        source = Source.of_text(*(torch.tensor(row, device=model.device) for row in (ids, start)))
        randomness = SampledRandomness(torch.Generator(model.device).manual_seed(0))
        session = drafter.open(source, Sampling(), randomness)
        tokens = source.prefix
        while (left := len(start) + NEW_TOKENS - len(tokens)) > 0:
            proposal = run_single(session.propose(tokens, None, stop.capped(left)))
            if len(proposal.tokens) == 0:
                break
            tokens = torch.cat([tokens, proposal.tokens.to(tokens.device)])
        drafts.append(tokens[len(start) :].tolist())
    return drafts


def _decode(folder: Path, reference: Reference, parts: Parts, result: Verification) -> Verification:
    """Compares the folder's custom_generate with plain greedy decoding of the target.

    A lossy verifier is replaced by the lossless one, with the same drafter and stop policy.
    """
    target = load_target(reference.target).model
    drafter = parts.drafter.to(target.device, target.dtype)
    lossless = parts.policy.model_copy(update={"verifier": AUTO})
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    options["num_return_sequences"] = 1
    whole, ties = {"output_logits": True, "return_dict_in_generate": True}, 0
    for row, ids in enumerate(reference.inputs):
        input_ids = torch.tensor([ids], device=target.device)
        options |= {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        plain = target.generate(**options, **whole, **cache_for_generate(target))
        speculated = target.generate(
            **options,
            assistant_model=drafter,
            policy=dump_policy(lossless),
            custom_generate=str(folder),
            trust_remote_code=True,  # a few lines, written by folder.py
        )[0]
        if torch.equal(plain.sequences[0], speculated):
            continue
        if gap_at_difference(plain, speculated) >= TIE:
            return Verification(
                difference=f"custom_generate and plain greedy decoding give different outputs for "
                f"input {row} of the check; see whether they agree in `drafttrain eval`, or set "
                "check=drafter"
            )
        ties += 1
    return result.model_copy(update={"decoded": len(reference.inputs), "ties": ties})


def gap_at_difference(plain: ModelOutput, drafted: Tensor) -> float:
    """Returns the gap between the two largest logits where two outputs first differ.

    The logits are those of `generate`'s output. Infinite if the outputs differ before the first new
    token, or if one is a prefix of the other. Shapes: drafted [T].
    """
    tokens = plain.sequences[0]
    shared = min(len(tokens), len(drafted))
    unequal = (tokens[:shared] != drafted[:shared]).nonzero()
    step = int(unequal[0]) - (len(tokens) - len(plain.logits)) if len(unequal) else -1
    if step < 0:
        return torch.inf
    best, second = plain.logits[step][0].float().topk(2).values.tolist()
    return best - second


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(compare(*map(Path, sys.argv[1:3])).model_dump_json())
