"""Measure what calls, heads and rules cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter

import numpy as np
import torch

from drafttrain.build.method import build_sampling
from drafttrain.decoding.drafters.causal import RowsOf
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import Entropy, HeadPolicy
from drafttrain.decoding.types import DraftState, Output, Proposal
from drafttrain.decoding.verifiers import make_verifier
from drafttrain.evaluation.metrics import mean_target_seconds
from drafttrain.evaluation.options import timing_options
from drafttrain.evaluation.played.candidates import CASCADE, Played, timed_of
from drafttrain.evaluation.played.costs import MethodCosts, check_asked, method_costs
from drafttrain.evaluation.runner import Decoded, make_jobs, make_waves, run_interleaved
from drafttrain.evaluation.stops.costs import fit_costs, threshold_from_costs
from drafttrain.evaluation.stops.prices import Prices, RuleCost
from drafttrain.evaluation.stops.replay import Candidate, times_judged
from drafttrain.evaluation.stops.report import CostFacts
from drafttrain.evaluation.stops.round_costs import RoundCosts, round_costs
from drafttrain.evaluation.stops.workbench import Workbench
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import ROW_FEATURES, drawn_state

LEAST_TAKEN = 2**21
"""Numbers that are read before each timing, at least."""
MOST_TAKEN = 2**24
"""Numbers that are read before a head is timed, at most: 64 MB, more than a core's share of caches,
so that its own weights come from memory, as behind a large target."""
TIMED = 5
"""Fixed lengths, at most, that costs are measured with."""


def measure_costs(bench: Workbench) -> tuple[Prices, CostFacts]:
    """What calls cost on this machine: some prompts decoded at some lengths, and by some trees and
    cascades, interleaved, at every batch size asked for; at batch size 1 under a head too, which
    takes longer between two passes than by itself."""
    lengths, played = timed_lengths(bench.settings.lengths), timed_of(bench.played)
    prompts = bench.choosing.prompts[: bench.settings.timing_prompts]
    options = timing_options(bench.sampling)
    asked = never_stopping(bench, lengths[-1])
    methods = [*map(bench.method, lengths), *map(bench.triple, played), *map(bench.triple, asked)]
    jobs = make_jobs(bench.pair.target, bench.target, methods, prompts, options)
    common, device = len(jobs) - len(asked), bench.target.device
    ran = {
        size: run_interleaved(
            jobs if size == 1 else jobs[:common], len(prompts), options, device, True, size
        )
        for size in bench.batch_sizes
    }
    of_asked, ran[1] = ran[1][common:], ran[1][:common]
    before = [len(prompt.source.prefix) for prompt in prompts]
    timed = {size: runs[: 1 + len(lengths)] for size, runs in ran.items()}
    waves = {size: make_waves(len(prompts), size, options.wave_batches) for size in sorted(ran)}
    rounds: dict[int, RoundCosts] = {}
    for size, own in waves.items():
        each = not bench.block
        rounds[size] = round_costs(timed[size], before, size, each, rounds, own)
    plain, *drafted = timed[1]
    outputs = [output for decoded in drafted for output in decoded.outputs]
    costs = fit_costs(outputs, bench.block)
    heads = {name: head_seconds(bench, head) for name, head in bench.heads.items()}
    hidden, logits = example(bench)
    taken = caches_taken(bench)
    entropy = decision_seconds(Entropy(1e9, 100), hidden, as_seen(bench, logits), taken)
    if asked:
        deepest, (by_rows, by_head) = str(asked[1].head), (run.outputs for run in of_asked)
        in_place = entropy + longer_drafting(bench, asked[1], by_head, by_rows)
        more = max(in_place - heads[deepest], 0.0)
        heads = {name: alone + more for name, alone in heads.items()}
    others = [name for name in bench.verifiers if name != "rejection"]
    rules = {name: rule_cost(bench, name, max(lengths)) for name in others}
    used = sorted(frozenset().union(*(one.uses for one in played)))
    check_asked([bench.drafters[level] for level in used], ran[1][1 + len(lengths) :])
    methods: dict[tuple[str, int], MethodCosts] = {}
    for size, own in waves.items():
        for way, found in by_way(played, ran[size][1 + len(lengths) :]).items():
            names = bench.drafters if way == CASCADE else ()
            smaller = {less: methods[way, less] for less in waves if less < size}
            methods[way, size] = method_costs(found, before, names, way, size, smaller, own)
    prices = Prices(rounds, heads, entropy, rules, methods)
    slower = costs.t_target > costs.t_draft
    facts = CostFacts(
        **asdict(costs),
        plain_target=mean_target_seconds(plain.outputs),
        plain_tokens_per_second=rounds[1].plain_tokens_per_second,
        rounds=list(rounds.values()),
        methods=list(methods.values()),
        lengths=lengths,
        prompts=len(prompts),
        entropy_seconds=entropy,
        rules={name: rule.call + rule.token * max(lengths) for name, rule in rules.items()},
        suggested_h=threshold_from_costs(costs.t_draft, costs.t_target) if slower else None,
    )
    return prices, facts


def never_stopping(bench: Workbench, k: int) -> list[Candidate]:
    """Policies that are asked before each of k tokens and always go on: one that goes by rows, and
    the deepest head. None where a head judges a block at once, which takes long enough alone."""
    if bench.block or not bench.heads:
        return []
    deepest = max(bench.heads, key=lambda name: bench.heads[name].config.depth)
    return [
        Candidate("entropy", 1e9, max_draft=k),
        Candidate("head", 1.0 - 1e-9, deepest, max_draft=k),
    ]


def longer_drafting(
    bench: Workbench, head: Candidate, outputs: Sequence[Output], others: Sequence[Output]
) -> float:
    """What a head that never stops takes longer, each time that it is asked, than another policy
    that never does.

    They draw by the same random numbers, so that the rounds are the same. The median over rounds
    but the first of each output, which reads the prompt; 0 where nothing is asked.
    """
    found: list[float] = []
    for output, other in zip(outputs, others, strict=True):
        drafted = np.array([len(played.drafted) for played in output.rounds])
        asked = times_judged(head, drafted, drafted, bench.block, bench.drafting.lag).tolist()
        pairs = list(zip(output.rounds, other.rounds, asked, strict=False))
        found += [
            (own.draft_seconds - its.draft_seconds) / times
            for own, its, times in pairs[1:]
            if times > 0 and len(own.drafted) == len(its.drafted)
        ]
    return max(float(np.median(found)), 0.0) if found else 0.0


def by_way(played: Sequence[Played], runs: Sequence[Decoded]) -> dict[str, list[Decoded]]:
    """The runs of each way."""
    found: dict[str, list[Decoded]] = {}
    for one, run in zip(played, runs, strict=True):
        found.setdefault(one.way, []).append(run)
    return found


def head_seconds(bench: Workbench, head: AcceptanceHead) -> float:
    """What a head takes to judge a token, or all slots of a block, as the policy asks it; where
    states are made for heads alone, with the time to make one."""
    hidden, logits = example(bench)
    slots = bench.settings.max_draft if bench.block else 1
    policy = HeadPolicy(head, 1.0 - 1e-9, 100)
    rows = as_seen(bench, logits)
    taken = caches_taken(bench)
    judging = decision_seconds(policy, hidden.expand(slots, -1), rows, taken)
    if bench.state_kind != "drawn":
        return judging
    state = hidden[0, :-ROW_FEATURES]
    return judging + median_seconds(lambda: drawn_state(state, rows[-1], 0), taken)


def rule_cost(bench: Workbench, name: str, longest: int) -> RuleCost:
    """What a rule takes more than rejection: both judge made-up drafts of 1 and of many tokens."""
    rows, sampling = example(bench)[1], build_sampling(bench.sampling)
    randomness = SampledRandomness(torch.Generator(device=rows.device).manual_seed(0))
    more = []
    for length in (1, longest + 1):
        logits = rows.float().expand(length + 1, -1).contiguous()
        draft_probs = logits[:length].softmax(dim=-1)
        proposal = Proposal.chain(torch.arange(length), draft_probs)
        took = [
            median_seconds(
                lambda rule=rule, proposal=proposal, logits=logits: rule.judge(
                    proposal, logits, sampling, randomness
                )
            )
            for rule in map(make_verifier, (name, "rejection"))
        ]
        more.append(took[0] - took[1])
    token = (more[1] - more[0]) / longest
    return RuleCost(call=more[0] - token, token=token)


def example(bench: Workbench) -> tuple[torch.Tensor, torch.Tensor]:
    """A hidden state and a row of logits of the drafter's sizes, for timing. [1, D], [V]."""
    model = bench.pair.drafter_model
    width = next((head.config.hidden_size for head in bench.heads.values()), 1)
    vocabulary = bench.pair.target.model.config.get_text_config(decoder=True).vocab_size
    like = {"dtype": model.dtype, "device": model.device}
    return torch.zeros(1, width, **like), torch.zeros(vocabulary, **like)


def caches_taken(bench: Workbench) -> torch.Tensor:
    """As much as the pair's weights, which are read between a round's first question and those of
    the round before; `MOST_TAKEN` at most. [N]."""
    models = bench.pair.target.model, bench.pair.drafter_model
    bytes_of_weights = sum(
        weight.numel() * weight.element_size() for model in models for weight in model.parameters()
    )
    return torch.ones(min(max(bytes_of_weights // 4, LEAST_TAKEN), MOST_TAKEN))


def as_seen(bench: Workbench, logits: torch.Tensor) -> Sequence[torch.Tensor]:
    """Two rows as policies see them. [V] -> [V] each, or the scores of what is drafted alone."""
    rows = [logits.float()] * 2
    drafted = None if bench.block else bench.pair.drafter.model.draftable
    return rows if drafted is None else RowsOf(drafted, rows)


def timed_lengths(lengths: Sequence[int]) -> list[int]:
    """The least, the most, and up to three between them, of which each is about as many times the
    one before: what a few rows more cost differs most where rows are few. A single length is timed
    beside twice itself."""
    ordered = sorted(set(lengths))
    if len(ordered) == 1:
        ordered.append(2 * ordered[0])
    wanted = np.geomspace(ordered[0], ordered[-1], TIMED)
    return sorted({min(ordered, key=lambda length: abs(length - want)) for want in wanted})


def decision_seconds(
    policy: StopPolicy,
    hidden: torch.Tensor,
    rows: Sequence[torch.Tensor],
    taken: torch.Tensor,
) -> float:
    """Seconds that a policy takes to judge what is new to it, the median of several.

    Shapes: hidden [N, D], one more token's state or those of all slots; rows as policies see them.
    taken: as of `median_seconds`.
    """
    states = hidden.unbind()
    # states before the newest were judged at earlier questions (`DraftState.notes`)
    return median_seconds(
        lambda: policy.should_draft(DraftState(depth=2, logits=rows, hidden=states)), taken
    )


@torch.inference_mode()
def median_seconds(
    work: Callable[[], object], taken: torch.Tensor | None = None, repeats: int = 50
) -> float:
    """Median time of some work, as decoding would do it: right behind other work, which has taken
    the caches. Again and again by itself it would take less.

    taken: what the other work reads; default: `LEAST_TAKEN` numbers.
    """
    taken = torch.ones(LEAST_TAKEN) if taken is None else taken
    times = []
    for _ in range(repeats):
        taken.sum()
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return float(np.median(times))
