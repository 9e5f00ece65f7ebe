"""Load an export as its users will, in a process that never saw the original, and compare.

    python -m drafttrain.export.reload FOLDER REFERENCE

REFERENCE is a folder that `verify.py` wrote: what every part was before it was saved. Prints one
line of JSON, a `Verification`; nothing else goes to standard output.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, logging

from drafttrain.build.drafters import make_drafter
from drafttrain.build.policy import HEAD, POLICY, dump_policy, read_policy
from drafttrain.build.stops import make_stop
from drafttrain.build.verifiers import AUTO
from drafttrain.config.inputs import TargetConfig
from drafttrain.config.kinds import kind_of
from drafttrain.config.policy import Policy
from drafttrain.decoding.drafters.block_along import block_states
from drafttrain.decoding.roles import Drafter, StopPolicy
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.shared import alone
from drafttrain.decoding.types import Sampling, Source
from drafttrain.export.heard import gaps_on_noise, made_up_encoding, made_up_states
from drafttrain.export.made_up_target import states_behind_made_up
from drafttrain.models.acceptance_head import AcceptanceHead, load_heads
from drafttrain.models.drafters import load_drafter, read_drafter_settings, reads_encoder
from drafttrain.models.identity import hash_tokenizer, hash_weights
from drafttrain.models.loading import cache_for_generate, load_target
from drafttrain.models.speech import shares_encoder
from drafttrain.models.state_drafter import StateDrafter

TOKENS = 8
"""Length of the input on which logits are compared; every model takes as many."""
NEW_TOKENS = 32
"""Tokens drafted or decoded for an input."""
TIE = 1e-4
"""Top-2 logit gap of the target below which a greedy choice is a matter of rounding."""
RESAVE = "load and save the drafter once with save_pretrained, and export that"
FACTS, TENSORS = "facts.json", "tensors.safetensors"


class Facts(BaseModel):
    """What the parts were before they were saved, and what is to be decoded."""

    model_config = ConfigDict(frozen=True)

    weights: str
    head: str | None
    """Hash of the acceptance head's weights; None where there is none."""
    tokenizer: str
    vocabulary: dict[str, int]
    assisted: dict[str, float] | None
    """num_assistant_tokens and assistant_confidence_threshold; None for block drafters."""
    policy: Policy
    inputs: list[list[int]]
    drafts: list[list[int]]
    target: TargetConfig | None
    """The target to decode with; None: only drafts are compared."""


class Verification(BaseModel):
    """What was found when an export was loaded again."""

    model_config = ConfigDict(frozen=True)

    differences: list[str]
    """What is not as it was, and what to do; empty: everything is."""
    drafted: int
    """Inputs whose drafts are those of the original drafter."""
    decoded: int = 0
    """Inputs decoded by the target with custom_generate, and found equal to plain greedy."""
    ties: int = 0
    """How many of these left it where the target's two best tokens tie up to rounding."""


def compare(folder: Path, reference: Path) -> Verification:
    """Everything in an export against what it was made from.

    Weights, tokenizer and vocabulary by content; logits and predictions up to rounding.
    """
    facts = Facts.model_validate_json((reference / FACTS).read_text(encoding="utf-8"))
    tensors = load_file(reference / TENSORS)
    drafter = load_drafter(folder, read_drafter_settings(str(folder)))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = read_policy(folder / POLICY)
    head = None if facts.head is None else next(iter(load_heads(folder / HEAD).values()))
    checks = {
        "the drafter's weights": hash_weights(drafter) == facts.weights,
        "the drafter's logits": same_numbers(some_logits(drafter), tensors["logits"]),
        "generation_config.json": assisted_settings(drafter) == facts.assisted,
        "the tokenizer": hash_tokenizer(tokenizer) == facts.tokenizer,
        "the vocabulary": tokenizer.get_vocab() == facts.vocabulary,
        "the acceptance head": head is None
        or hash_weights(head) == facts.head
        and same_numbers(some_predictions(head), tensors["head"]),
        POLICY: dump_policy(policy) == dump_policy(facts.policy),
    }
    wrong = [
        f"{name} changed while being written; {RESAVE}" for name, same in checks.items() if not same
    ]
    if wrong:
        return Verification(differences=wrong, drafted=0)
    drafts = some_drafts(drafter, make_stop(policy.stop_config(), head), facts.inputs)
    same = sum(one == other for one, other in zip(drafts, facts.drafts, strict=True))
    if same < len(drafts):
        return Verification(differences=[f"the drafts changed; {RESAVE}"], drafted=same)
    if facts.target is None:
        return Verification(differences=[], drafted=same)
    if shares_encoder(drafter.config):
        return _decode_noise(folder, facts.target, same)
    return _decode(folder, facts, policy, same)


def _decode(folder: Path, facts: Facts, policy: Policy, drafted: int) -> Verification:
    """The target with the folder's custom_generate, against the target alone, greedily.

    Under a lossy verifier the lossless one is compared: same drafter, same stops.
    """
    target, drafter = _load_both(folder, facts.target)
    lossless = policy.model_copy(update={"verifier": AUTO})
    asked = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    ties, wrong = 0, []
    for row, ids in enumerate(facts.inputs):
        given = torch.tensor([ids], device=target.device)
        source = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        plain = target.generate(**source, **asked, **cache_for_generate(target))[0]
        drafted_output = target.generate(
            **source,
            **asked,
            assistant_model=drafter,
            policy=dump_policy(lossless),
            custom_generate=str(folder),
            trust_remote_code=True,  # three lines, written by folder.py
        )[0]
        if torch.equal(plain, drafted_output):
            continue
        if gap_where_they_part(target, given, plain, drafted_output) < TIE:
            ties += 1
        else:
            wrong.append(
                f"custom_generate gives another output than the target alone for input {row} of "
                "the check; see whether they agree in `drafttrain eval`, or set check=drafter"
            )
    decoded = len(facts.inputs) - len(wrong)
    return Verification(differences=wrong, drafted=drafted, decoded=decoded, ties=ties)


def _decode_noise(folder: Path, target: TargetConfig, drafted: int) -> Verification:
    """Transformers' own assisted generation against the target alone, greedily, on noise."""
    gaps = gaps_on_noise(*_load_both(folder, target), NEW_TOKENS)
    ties = sum(gap is not None and gap < TIE for gap in gaps)
    wrong = [
        f"assisted generation gives another output than the target alone for clip {clip} of the "
        "check; see whether they agree in `drafttrain eval`, or set check=drafter"
        for clip, gap in enumerate(gaps)
        if gap is not None and gap >= TIE
    ]
    decoded = len(gaps) - len(wrong)
    return Verification(differences=wrong, drafted=drafted, decoded=decoded, ties=ties)


def _load_both(folder: Path, target: TargetConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The target, and the export's drafter beside it."""
    model = load_target(target).model
    drafter = load_drafter(folder, read_drafter_settings(str(folder)))
    return model, drafter.to(model.device, model.dtype)


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


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Equal up to a few roundings of the largest: another layout may sum in another order."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    allowed = 32 * torch.finfo(ours.dtype).eps * float(theirs.abs().max())
    return float((ours - theirs).abs().max()) <= allowed


@torch.inference_mode()
def some_logits(drafter: PreTrainedModel) -> Tensor:
    """Logits on tokens spread over the vocabulary, as source and as output; of a drafter that
    projects by its target's output, the states in front of it. [T, V]"""
    ids = torch.arange(TOKENS) * (vocabulary_size(drafter) - 1) // TOKENS + 1
    if isinstance(drafter, StateDrafter):
        return states_behind_made_up(drafter, TOKENS)
    if not kind_of(drafter.config).runs_as_targets:
        source = ids
        if drafter.config.encoder == "target":
            source = made_up_encoding(drafter, ids)
        states, previous = block_states(
            drafter,
            source,
            ids,
            range(TOKENS),
            drafter.config.k,
            before=made_up_states(drafter, ids),
        )
        return drafter.logits(states, previous).flatten(0, 1)
    if drafter.config.is_encoder_decoder:
        return drafter(input_ids=ids[None], decoder_input_ids=ids[None]).logits[0]
    if shares_encoder(drafter.config):
        return drafter(ids[None], encoder_outputs=(made_up_encoding(drafter, ids)[None],)).logits[0]
    return drafter(input_ids=ids[None]).logits[0]


@torch.inference_mode()
def some_predictions(head: AcceptanceHead) -> Tensor:
    """Predictions on states of several sizes. [T]"""
    width = head.config.hidden_size
    rows = torch.linspace(-3.0, 3.0, TOKENS * width, device=head.out.weight.device)
    return head.acceptance(rows.view(TOKENS, width))


def some_drafts(
    model: PreTrainedModel, stop: StopPolicy, inputs: Sequence[Sequence[int]]
) -> list[list[int]]:
    """What is drafted for each input when everything is accepted, round after round; nothing of a
    drafter that needs its target for it."""
    if kind_of(model.config).reads_target:
        return []
    drafter = make_drafter(model)
    return [_draft(drafter, stop, _source(model, ids)) for ids in inputs]


def _draft(drafter: Drafter, stop: StopPolicy, source: Source) -> list[int]:
    randomness = SampledRandomness(torch.Generator(source.prefix.device).manual_seed(0))
    session = drafter.open(source, Sampling(), randomness)
    tokens, start = source.prefix, len(source.prefix)
    while len(tokens) - start < NEW_TOKENS:
        left = NEW_TOKENS - (len(tokens) - start)
        proposal = alone(session.propose(tokens, None, stop.capped(left)))
        if len(proposal.tokens) == 0:
            break
        tokens = torch.cat([tokens, proposal.tokens.to(tokens.device)])
    return tokens[start:].tolist()


def _source(model: PreTrainedModel, ids: Sequence[int]) -> Source:
    given = torch.tensor(list(ids), device=model.device)
    if shares_encoder(model.config):
        return replace(Source.of_text(given, given), encoded=made_up_encoding(model, given))
    if not model.config.is_encoder_decoder:
        return Source.of_text(given, given)
    start = model.config.decoder_start_token_id
    prefix = torch.tensor([0 if start is None else start], device=model.device)
    source = Source.of_text(given, prefix)
    if not reads_encoder(model.config):
        return source
    return replace(source, encoded=made_up_encoding(model, given))


def assisted_settings(drafter: PreTrainedModel) -> dict[str, float] | None:
    """How Transformers' own assisted generation drafts; None for what it cannot use."""
    if not drafter.can_generate():
        return None
    written = drafter.generation_config
    return {
        "num_assistant_tokens": written.num_assistant_tokens,
        "assistant_confidence_threshold": written.assistant_confidence_threshold,
    }


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
