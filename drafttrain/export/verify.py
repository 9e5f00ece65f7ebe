"""An export is done when a fresh process has loaded all of it and found the same.

    python -m drafttrain.export.verify FOLDER REFERENCE

REFERENCE is a folder of `write_reference`: what every part was before it was saved. Compared are
weights, tokenizer, vocabulary, head and policy by content, logits up to rounding, the drafts for 20
inputs and, where there is a target to decode with, its outputs with and without the drafter. The
process prints one line of JSON, a `Verification`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, logging

from drafttrain.build.drafters import make_drafter
from drafttrain.build.method import AUTO, make_stop
from drafttrain.build.policy import HEAD, POLICY, dump_policy, read_policy
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.decoding.drafters.block_along import block_states
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.types import Sampling, Source
from drafttrain.export.parts import Assisted, Parts
from drafttrain.models.acceptance_head import load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings, reads_encoder
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import cache_for_generate, load_target
from drafttrain.models.state_drafter import StateDrafter

INPUTS, LONGEST = 20, 256
"""Inputs that are decoded, and the most tokens of one that is used."""
TOKENS = 8
"""Length of the input on which logits are compared; every model takes as many."""
NEW_TOKENS = 32
"""Tokens drafted or decoded for an input."""
TIE = 1e-4
"""Top-2 logit gap of the target below which a greedy choice is a matter of rounding."""
RESAVE = "load and save the drafter once with save_pretrained, and export that"
FACTS, TENSORS = "facts.json", "tensors.safetensors"


@dataclass(frozen=True)
class Check:
    """What to decode when an export is verified."""

    inputs: Sequence[Sequence[int]] = ()
    """Token ids, at most LONGEST each; random ones where there are none."""
    target: TargetConfig | None = None
    """The target to decode with; None: only drafts are compared."""


class Verification(BaseModel):
    """What was found when an export was loaded again."""

    model_config = ConfigDict(frozen=True)

    differences: list[str] = []
    """What is not as it was, and what to do; empty: everything is."""
    drafted: int = 0
    """Inputs whose drafts are those of the original drafter."""
    decoded: int = 0
    """Inputs decoded by the target with custom_generate, and found equal to plain greedy."""
    ties: int = 0
    """How many of these left it where the target's two best tokens tie up to rounding."""


class Reference(BaseModel):
    """What the parts were before they were saved, and what is to be decoded."""

    model_config = ConfigDict(frozen=True)

    facts: dict[str, Any]
    """`facts_of` the parts."""
    inputs: list[list[int]]
    drafts: list[list[int]]
    target: TargetConfig | None


Reload = Callable[[Path, Path], Verification]
"""Export and reference folders -> what was found."""


def verify(folder: Path, parts: Parts, check: Check, reload: Reload) -> Verification:
    """Compare an export with what it was made from. Raises ValueError naming what differs."""
    with tempfile.TemporaryDirectory() as place:
        write_reference(Path(place), parts, check)
        found = reload(folder, Path(place))
    if found.differences:
        raise ValueError(f"nothing was exported: {found.differences[0]}")
    return found


def write_reference(place: Path, parts: Parts, check: Check) -> None:
    """What the parts are, for `compare`."""
    inputs = [list(ids) for ids in check.inputs if len(ids) <= LONGEST][:INPUTS]
    inputs = inputs or random_inputs(vocabulary_size(parts.drafter))
    # before anything is drafted: a drafter may change the layout of its weights
    facts = facts_of(parts)
    save_file(numbers_of(parts), place / TENSORS)
    drafts = some_drafts(parts, inputs)
    reference = Reference(facts=facts, inputs=inputs, drafts=drafts, target=check.target)
    (place / FACTS).write_text(reference.model_dump_json(), encoding="utf-8")


def in_fresh_process(folder: Path, reference: Path) -> Verification:
    """`compare` in a Python process of its own. Raises ValueError where that fails."""
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


def compare(folder: Path, place: Path) -> Verification:
    """Everything in an export against what it was made from; `place`: the reference."""
    reference = Reference.model_validate_json((place / FACTS).read_text(encoding="utf-8"))
    numbers, parts = load_file(place / TENSORS), load_written(folder)
    found = facts_of(parts)
    same = {name: found[name] == fact for name, fact in reference.facts.items()}
    if all(same.values()):
        again = numbers_of(parts)
        same |= {name: same_numbers(again[name], old) for name, old in numbers.items()}
    wrong = [
        f"{name} changed while being written; {RESAVE}" for name, equal in same.items() if not equal
    ]
    if wrong:
        return Verification(differences=wrong)
    drafts = some_drafts(parts, reference.inputs)
    equal = sum(one == other for one, other in zip(drafts, reference.drafts, strict=True))
    if equal < len(drafts):
        return Verification(differences=[f"the drafts changed; {RESAVE}"], drafted=equal)
    if reference.target is None:
        return Verification(drafted=equal)
    return _decode(folder, reference, parts.policy, equal)


def load_written(folder: Path) -> Parts:
    """The parts of an export, from its files alone."""
    drafter = load_drafter(folder, read_drafter_settings(str(folder)))
    heads = load_heads(folder / HEAD) if (folder / HEAD).is_dir() else {}
    assisted = Assisted(0, 0.0)
    if drafter.can_generate():
        written = drafter.generation_config
        assisted = Assisted(written.num_assistant_tokens, written.assistant_confidence_threshold)
    return Parts(
        drafter=drafter,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        head=next(iter(heads.values()), None),
        policy=read_policy(folder / POLICY),
        assisted=assisted,
    )


def facts_of(parts: Parts) -> dict[str, Any]:
    """What must be equal, as JSON values by their names in messages."""
    can_generate = parts.drafter.can_generate()
    return {
        "the drafter's weights": hash_weights(parts.drafter),
        "generation_config.json": asdict(parts.assisted) if can_generate else None,
        "the tokenizer": hash_tokenizer(parts.tokenizer),
        "the vocabulary": parts.tokenizer.get_vocab(),
        "the acceptance head": None if parts.head is None else hash_weights(parts.head),
        POLICY: dump_policy(parts.policy),
    }


@torch.inference_mode()
def numbers_of(parts: Parts) -> dict[str, Tensor]:
    """What must be equal up to rounding: logits, and the head's predictions on hidden states of
    several sizes."""
    numbers = {"the drafter's logits": some_logits(parts.drafter).contiguous()}
    if (head := parts.head) is not None:
        states = torch.linspace(-3.0, 3.0, TOKENS * head.config.hidden_size, device=head.device)
        numbers["the head's predictions"] = head.acceptance(states.view(TOKENS, -1)).contiguous()
    return numbers


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to a few roundings of the largest: another layout may sum in another order."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    allowed = 32 * torch.finfo(ours.dtype).eps * float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= allowed


def some_logits(drafter: PreTrainedModel) -> Tensor:
    """Logits on tokens spread over the vocabulary, as source and as output; of a drafter that
    projects by its target's output, the hidden states in front of it. [T, V]"""
    ids = torch.arange(TOKENS) * (vocabulary_size(drafter) - 1) // TOKENS + 1
    if isinstance(drafter, StateDrafter):
        return _states_after_one_token(drafter)
    if not kind_of(drafter.config).runs_as_targets:
        config = drafter.config
        source = _made_up_encoding(drafter, ids) if reads_encoder(config) else ids
        width, before = getattr(config, "state_width", None), None
        if width is not None:  # the drafter also reads the target's hidden states
            before = torch.linspace(-3.0, 3.0, TOKENS * width).view(TOKENS, width)
            before = before.to(drafter.dtype)
        states, previous = block_states(
            drafter, source, ids, range(TOKENS), config.k, before=before
        )
        return drafter.logits(states, previous).flatten(0, 1)
    if drafter.config.is_encoder_decoder:
        return drafter(input_ids=ids[None], decoder_input_ids=ids[None]).logits[0]
    return drafter(input_ids=ids[None]).logits[0]


def _states_after_one_token(drafter: StateDrafter) -> Tensor:
    """Hidden states of TOKENS slots after one token of a made-up target, through all maps and
    layers. [N, D]"""
    config, shape = drafter.config, drafter.decoder.config
    width, depths = config.hidden_size, torch.arange(TOKENS) % config.k
    read = width * len(config.state_layers)
    states, token = torch.linspace(-3.0, 3.0, read + width).to(drafter.dtype).split([read, width])
    token = token.expand(TOKENS, -1)
    said = drafter.of_anchors(states.view(1, -1, width)).expand(TOKENS, -1, -1)
    inputs = drafter.fed(said, token, depths)
    heads = shape.num_key_value_heads
    size = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cached = torch.linspace(-1.0, 1.0, heads * size).to(drafter.dtype).view(1, heads, 1, size)
    mask = torch.zeros(1, 1, TOKENS, 1 + TOKENS, dtype=drafter.dtype)
    keys_values = [(cached, cached)] * len(config.context_layers)
    hidden = drafter(inputs[None], 1 + torch.arange(TOKENS)[None], mask, keys_values)[0]
    if drafter.previous_token is None:
        return hidden
    return drafter.previous_token(hidden, token, depths > 0)


def _made_up_encoding(drafter: PreTrainedModel, ids: Tensor) -> Tensor:
    """Random encoder states of the target, the same for the same ids. Shapes: [T] -> [S, D]."""
    config, generator = drafter.config, torch.Generator().manual_seed(int(ids.sum()))
    length = getattr(config, "max_source_positions", len(ids))
    width = getattr(config, "source_width", config.d_model)
    return torch.randn(length, width, generator=generator).to(drafter.device, drafter.dtype)


def random_inputs(vocabulary: int) -> list[list[int]]:
    """Inputs of 4 to 13 random tokens, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(vocabulary, (4 + row % 10,), generator=generator).tolist()
        for row in range(INPUTS)
    ]


def some_drafts(parts: Parts, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    """What is drafted for each input when everything is accepted, round after round; nothing of a
    drafter that needs its target for it."""
    model = parts.drafter
    if kind_of(model.config).reads_target:
        return []
    drafter, stop = make_drafter(model), make_stop(parts.policy.stop_config(), parts.head)
    found = []
    for ids in inputs:
        source = _source(model, ids)
        randomness = SampledRandomness(torch.Generator(source.prefix.device).manual_seed(0))
        session = drafter.open(source, Sampling(), randomness)
        tokens, end = source.prefix, len(source.prefix) + NEW_TOKENS
        while (left := end - len(tokens)) > 0:
            proposal = alone(session.propose(tokens, None, stop.capped(left)))
            if len(proposal.tokens) == 0:
                break
            tokens = torch.cat([tokens, proposal.tokens.to(tokens.device)])
        found.append(tokens[len(source.prefix) :].tolist())
    return found


def _source(model: PreTrainedModel, ids: Sequence[int]) -> Source:
    given = torch.tensor(list(ids), device=model.device)
    if not model.config.is_encoder_decoder:
        return Source.of_text(given, given)
    start = model.config.decoder_start_token_id
    source = Source.of_text(given, torch.tensor([start or 0], device=model.device))
    if not reads_encoder(model.config):
        return source
    return replace(source, encoded=_made_up_encoding(model, given))


def _decode(folder: Path, reference: Reference, policy: Policy, drafted: int) -> Verification:
    """The target with the folder's custom_generate, against the target alone, greedily.

    Under a lossy verifier the lossless one is compared: same drafter, same stops.
    """
    target = load_target(reference.target).model
    drafter = load_drafter(folder, read_drafter_settings(str(folder)))
    drafter = drafter.to(target.device, target.dtype)
    lossless = policy.model_copy(update={"verifier": AUTO})
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    ties, wrong = 0, []
    for row, ids in enumerate(reference.inputs):
        given = torch.tensor([ids], device=target.device)
        source = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        plain = target.generate(**source, **asked, **cache_for_generate(target))[0]
        speculated = target.generate(
            **source,
            **asked,
            assistant_model=drafter,
            policy=dump_policy(lossless),
            custom_generate=str(folder),
            trust_remote_code=True,  # three lines, written by folder.py
        )[0]
        if torch.equal(plain, speculated):
            continue
        if gap_where_they_part(target, given, plain, speculated) < TIE:
            ties += 1
        else:
            wrong.append(
                f"custom_generate gives another output than the target alone for input {row} of "
                "the check; see whether they agree in `drafttrain eval`, or set check=drafter"
            )
    decoded = len(reference.inputs) - len(wrong)
    return Verification(differences=wrong, drafted=drafted, decoded=decoded, ties=ties)


@torch.inference_mode()
def gap_where_they_part(
    target: PreTrainedModel, source: Tensor, plain: Tensor, drafted: Tensor
) -> float:
    """The target's top-2 logit gap where they part; infinite before the first new token.

    Shapes: source [1, S], outputs [T] with what they start from.
    """
    shared = min(len(plain), len(drafted))
    unequal = (plain[:shared] != drafted[:shared]).nonzero()
    place = int(unequal[0]) if len(unequal) else shared
    if place < (1 if target.config.is_encoder_decoder else source.shape[1]):
        return math.inf
    if target.config.is_encoder_decoder:
        logits = target(input_ids=source, decoder_input_ids=plain[None, :place]).logits
    else:
        logits = target(input_ids=plain[None, :place]).logits
    best, second = logits[0, -1].float().topk(2).values.tolist()
    return best - second


def vocabulary_size(drafter: PreTrainedModel) -> int:
    return drafter.config.get_text_config(decoder=True).vocab_size


def main() -> None:
    """The command above."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, reference = map(Path, sys.argv[1:3])
    print(compare(folder, reference).model_dump_json())


if __name__ == "__main__":
    main()
