"""What methods would do along the target's own outputs: the target decodes and reads each once.

A drafter says how likely it drafts the output's own tokens at every prefix; the target, how likely
they were to it. Of a token that the target sampled, the probability that it was drafted and
accepted follows (`stops/trace.py`), and from these coins the rounds in expectation (`rounds.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

import numpy as np
import torch
from torch import Tensor

from drafttrain.build.method import Method
from drafttrain.build.verifiers import AUTO, build_verifier
from drafttrain.config.kinds import KINDS
from drafttrain.config.progress import tracking
from drafttrain.decoding.drafters.along import NOT_DRAFTED
from drafttrain.decoding.drafters.none import NoDrafter
from drafttrain.decoding.drafters.slots import lengths_differ
from drafttrain.decoding.engine.cached_model import CachedModel
from drafttrain.decoding.loop import Decoder
from drafttrain.decoding.sampling import SampledRandomness, sequence_randomness
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.target_states import TargetRequirements
from drafttrain.decoding.types import Source
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.forced.rounds import Expected, expect_rounds
from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.served.measure import Along, judge_along
from drafttrain.evaluation.stops.chain_trace import TraceOptions, judge
from drafttrain.evaluation.stops.prefix_trace import kept_prefixes

TOGETHER = 16
"""Outputs that the target decodes at once."""


@dataclass(frozen=True)
class OwnOutput:
    """An output of the target."""

    source: Source
    """As the target has read it, for all drafters."""
    tokens: Tensor
    """[L]."""
    target_probs: Tensor | None
    """[L, V] the rows that they are of; None where nobody asks for them."""
    limit: Array
    """[L] most tokens of a draft from each position: one less than is left to generate."""


@dataclass(frozen=True)
class Followed:
    """What methods would have done along P outputs."""

    lengths: Array
    """[P] tokens of each output."""
    rounds: list[list[Expected]]
    """[methods][P]."""
    judged: dict[str, list[Along]]
    """[P] of each language model, by what served runs call it: the rules of engines, which draft
    from all tokens, also those that our own engine leaves out."""


def follow_outputs(
    target: CachedModel,
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    options: EvaluationOptions,
    progress: bool = False,
    served: bool = True,
) -> Followed:
    """Decode every prompt plainly, and let every method follow the output.

    Drafts are chains of fixed lengths; the rule is greedy match, rejection or block verification.
    served: whether the rules of engines are followed too.
    """
    assisted = [m for m in methods if served and m.assistant is not None]
    models = {id(m.drafter): m.drafter.model.drafting_all() for m in assisted}
    named = {served_name(m): id(m.drafter) for m in assisted}
    lengths: list[int] = []
    rounds: list[list[Expected]] = [[] for _ in methods]
    judged: dict[int, list[Along]] = {key: [] for key in models}
    tracing = TraceOptions(options.sampling, options.max_new_tokens, depth=0)
    requires = TargetRequirements.union(method.drafter.requires for method in methods)
    needs_rows = bool(models) or not options.sampling.greedy
    outputs = own_outputs(target, prompts, requires, tracing, options.seed, needs_rows)
    with tracking(len(prompts), "follow", "input", shown=progress) as work:
        for own in outputs:
            lengths.append(len(own.tokens))
            for place, found in enumerate(follow(methods, own, tracing)):
                rounds[place].append(found)
            for key, drafter in models.items():
                judged[key].append(
                    judge_along(target, drafter, own.source, own.tokens, tracing, own.target_probs)
                )
            work.update()
    by_name = {name: judged[key] for name, key in named.items()}
    return Followed(np.array(lengths, dtype=np.float64), rounds, by_name)


def served_name(method: Method) -> str:
    """What served runs call a method's drafter."""
    return method.other or method.drafter.name


@torch.inference_mode()
def own_outputs(
    target: CachedModel,
    prompts: Sequence[Prompt],
    requires: TargetRequirements,
    tracing: TraceOptions,
    seed: int,
    needs_rows: bool,
) -> Iterator[OwnOutput]:
    """What the target makes of prompts by plain decoding, in order: the outputs that `drafttrain
    eval` decodes one by one, here `TOGETHER` at once."""
    for start in range(0, len(prompts), TOGETHER):
        some = prompts[start : start + TOGETHER]
        yield from _decode_together(target, some, requires, tracing, seed, needs_rows)


def _decode_together(
    target: CachedModel,
    prompts: Sequence[Prompt],
    requires: TargetRequirements,
    tracing: TraceOptions,
    seed: int,
    needs_rows: bool,
) -> Iterator[OwnOutput]:
    sampling = tracing.sampling

    def randomness(index: int) -> SampledRandomness:
        return sequence_randomness(seed, prompts[index].row, target.device)

    verifier = build_verifier(AUTO, sampling)
    decoder = Decoder(target, NoDrafter(), FixedLength(1), verifier, sampling, randomness)
    sources = [target.read(prompt.source, requires) for prompt in prompts]
    outputs = decoder.decode_all(sources, tracing.max_new_tokens, len(sources))
    for source, output in zip(sources, outputs, strict=True):
        tokens = torch.tensor(output.tokens, dtype=torch.long)
        probs = None
        if needs_rows:
            probs = judge(target, source, tokens.to(source.prefix.device), tracing).cpu()
        room = target.max_new_tokens(source, tracing.max_new_tokens)
        limit = np.maximum(room - 1 - np.arange(len(tokens)), 0)
        yield OwnOutput(source, tokens, probs, limit)


def follow(methods: Sequence[Method], own: OwnOutput, tracing: TraceOptions) -> list[Expected]:
    """The rounds of every method along one output; methods of a drafter share its passes."""
    longest: dict[tuple[int, int], int] = {}
    for method in methods:
        key = _pass_of(method)
        longest[key] = max(longest.get(key, 0), method.stop.longest)
    drafted: dict[tuple[int, int], Tensor] = {}
    found = []
    for method in methods:
        key = _pass_of(method)
        if key not in drafted:
            drafted[key] = draft_along(method, own, longest[key], tracing)
        coins = accepted_along(drafted[key][:, : method.stop.longest], own, method)
        found.append(_expect(method, own, coins))
    return found


def _pass_of(method: Method) -> tuple[int, int]:
    """Methods for which this is equal get their drafts from one pass: those of one drafter, unless
    its drafts of another length are others."""
    differ = lengths_differ(method.drafter)
    return id(method.drafter), method.stop.longest if differ else 0


def draft_along(method: Method, own: OwnOutput, k: int, tracing: TraceOptions) -> Tensor:
    """How likely it drafts the output's own tokens at every prefix. [L, K], K <= k."""
    kind, most = KINDS[method.drafter.name], np.minimum(own.limit, k)
    if most.max() == 0:
        return torch.zeros(len(own.tokens), 0, dtype=torch.double)
    if not lengths_differ(method.drafter):
        # one length is one pass; rounds cut what they have no room for
        most = np.where(most > 0, most.max(), 0)
    along = resolve_name(kind.probs_along)
    return along(method.drafter, own.source, own.tokens, most.tolist(), tracing.sampling)


def accepted_along(draft_probs: Tensor, own: OwnOutput, method: Method) -> Array:
    """How likely each token of each round was drafted and accepted, given the output and that those
    before it were. [L, K] -> [L, K]; NOT_DRAFTED as it is.

    In greedy decoding the target's own token has probability 1. Block verification weighs prefixes.
    """
    probs = draft_probs.clamp_min(0.0)
    at_target = torch.ones_like(probs)
    if own.target_probs is not None:
        own_probs = own.target_probs.gather(-1, own.tokens[:, None])[:, 0].double()
        places = torch.arange(len(probs))[:, None] + torch.arange(probs.shape[1])
        at_target = own_probs[places.clamp_max(len(own_probs) - 1)]
    kept = probs
    if probs.shape[1] > 0:
        kept, _ = kept_prefixes(probs, at_target, weighed=method.verifier.name == "block")
    return torch.where(draft_probs < 0.0, NOT_DRAFTED, kept).numpy()


def _expect(method: Method, own: OwnOutput, coins: Array) -> Expected:
    """Rounds that start at the first token; language models end their drafts at EOS."""
    ends = None
    if KINDS[method.drafter.name].is_language_model:
        ends = np.array([token in method.drafter.eos_ids for token in own.tokens.tolist()])
    return expect_rounds(coins, own.limit, method.stop.longest, first=0, ends=ends)
