"""The choice of tuning: costs, counts of every candidate, and the best at every batch size.

Chains are replayed from one trace a prompt, all on all prompts. Trees and cascades are played,
those that look worse on a few prompts on no more than these (`played.halving`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drafttrain.config.commands import TuneConfig
from drafttrain.decoding.types import Output
from drafttrain.evaluation.options import timing_options
from drafttrain.evaluation.played.candidates import Played, near
from drafttrain.evaluation.played.counts import count_output
from drafttrain.evaluation.played.halving import Halving, Searched, halve, play_also
from drafttrain.evaluation.played.player import Player
from drafttrain.evaluation.prompts import Prompt, PromptSet
from drafttrain.evaluation.report import data_facts
from drafttrain.evaluation.runner import Decoded, make_jobs, make_waves, run_interleaved
from drafttrain.evaluation.stops.decoded import count_chain
from drafttrain.evaluation.stops.measuring import measure_costs
from drafttrain.evaluation.stops.policy_results import (
    CHAINS,
    CHOSEN,
    batch_choice,
    best_of,
    candidates_of,
    policy_results,
    ranked,
    throughput,
)
from drafttrain.evaluation.stops.prices import AnyCandidate, Prices
from drafttrain.evaluation.stops.replay import Candidate, PolicyCounts, VerifierOfChains
from drafttrain.evaluation.stops.report import BatchChoice, CheckedPolicy, CostFacts, Replayed
from drafttrain.evaluation.stops.trace_and_replay import replay_prompts
from drafttrain.evaluation.stops.workbench import Workbench

FINALISTS = 4
"""Trees and cascades, at least, that see all prompts; so many of each batch size are reported."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, on the prompts to choose on."""

    candidates: Sequence[AnyCandidate]
    """Chains, then the best of what was played."""
    prices: Prices
    costs: CostFacts
    counts: PolicyCounts
    best: AnyCandidate
    chain: Candidate
    """The best stop policy of a chain."""
    fixed: Candidate
    head: Candidate | None
    batches: list[BatchChoice]
    searched: Searched


def choose(bench: Workbench, player: Player) -> Choice:
    """Measure costs, replay every policy, play what is no chain, and take what makes the most
    predicted tokens a second, at every batch size."""
    settings = bench.settings
    prices, costs = measure_costs(bench)
    draft_cost = costs.t_draft / costs.t_target
    chains = all_candidates(settings, list(bench.heads), draft_cost, bench.verifiers)
    chains = [one for one in chains if bench.replays(one)]
    replayed_counts = replay_prompts(bench, chains, bench.choosing.prompts, "choose")
    searched = search(bench, player, prices)
    played = finalists(searched.finished, prices, bench.batch_sizes)
    counts = beside(replayed_counts, [searched.finished[one] for one in played])
    candidates = [*chains, *played]
    best, chain, fixed = (
        best_of(counts, candidates, prices, kinds, depths=bench.depths)
        for kinds in (CHOSEN, CHAINS, ("fixed",))
    )
    head = (
        best_of(counts, candidates, prices, ("head",), depths=bench.depths) if bench.heads else None
    )
    batches = [
        batch_choice(counts, candidates, prices, size, settings.bootstrap, bench.depths)
        for size in bench.batch_sizes
    ]
    return Choice(candidates, prices, costs, counts, best, chain, fixed, head, batches, searched)


def search(bench: Workbench, player: Player, prices: Prices) -> Searched:
    """Successive halving over the trees and cascades, then what is near the best cascade."""
    prompts = bench.choosing.prompts
    halving = Halving(bench.settings.first_prompts, FINALISTS)

    def play(prompt: int, some: Sequence[Played]) -> list[PolicyCounts]:
        return play_prompt(bench, player, prompts[prompt], some)

    def rank(counts: Mapping[Played, PolicyCounts]) -> list[list[Played]]:
        return [rank_played(counts, prices, size) for size in bench.batch_sizes]

    found = halve(bench.played, len(prompts), play, rank, halving, progress=True)
    if not bench.settings.local:
        return found
    firsts = [order[0] for order in rank(found.finished) if order]
    more = dict.fromkeys(one for first in firsts for one in near(bench.settings, first))
    return play_also(found, list(more), len(prompts), play, progress=True)


def rank_played(
    counts: Mapping[Played, PolicyCounts], prices: Prices, batch_size: int
) -> list[Played]:
    """Candidates by falling predicted tokens a second; the first on ties."""

    def rate(one: Played) -> float:
        ratio = throughput(counts[one], 0, one, prices, batch_size)
        return float(ratio.numerators.sum() / ratio.denominators.sum())

    return sorted(counts, key=rate, reverse=True)


def finalists(
    counts: Mapping[Played, PolicyCounts], prices: Prices, batch_sizes: Sequence[int]
) -> list[Played]:
    """The best few at every batch size."""
    orders = [rank_played(counts, prices, size)[:FINALISTS] for size in batch_sizes]
    return list(dict.fromkeys(one for order in orders for one in order))


def play_prompt(
    bench: Workbench, player: Player, prompt: Prompt, candidates: Sequence[Played]
) -> list[PolicyCounts]:
    """What each candidate spends on a prompt, [1, 1] each."""
    before = len(prompt.source.prefix)
    outputs = player.play(prompt, candidates)
    return [count_output(output, before, bench.drafters) for output in outputs]


def count_on(
    bench: Workbench, player: Player, choice: Choice, prompts: PromptSet, label: str
) -> PolicyCounts:
    """Counts of all candidates on other prompts."""
    chains = [one for one in choice.candidates if isinstance(one, Candidate)]
    played = [one for one in choice.candidates if isinstance(one, Played)]
    replayed_counts = replay_prompts(bench, chains, prompts.prompts, label)
    found = [play_prompt(bench, player, prompt, played) for prompt in prompts.prompts]
    return beside(replayed_counts, [PolicyCounts.stack(own) for own in zip(*found, strict=True)])


def beside(chains: PolicyCounts, played: Sequence[PolicyCounts]) -> PolicyCounts:
    """Counts of chains, and behind them those of what was played."""
    first = chains.tokens.shape[1]
    places = [[*range(first)], *([first + i] for i in range(len(played)))]
    return PolicyCounts.beside([chains, *played], places)


def check_predictions(bench: Workbench, choice: Choice) -> list[CheckedPolicy]:
    """The best few, the best head among them, and the best fixed length, decoded for real at every
    batch size, beside what the rounds that they took should have cost."""
    settings, prices = bench.settings, choice.prices
    prompts = bench.choosing.prompts[: settings.timing_prompts]
    found = []
    before = np.array([len(prompt.source.prefix) for prompt in prompts], dtype=np.float64)
    for size in bench.batch_sizes if settings.finalists else ():
        given = choice.counts, choice.candidates, prices
        kinds = (CHOSEN, ("head",)) if bench.heads else (CHOSEN,)
        firsts = [best_of(*given, some, size, bench.depths) for some in kinds]
        order = dict.fromkeys([*firsts, *ranked(*given, CHOSEN, size)])
        fixed = best_of(*given, ("fixed",), size)
        chosen = list(dict.fromkeys([*list(order)[: settings.finalists], fixed]))
        options = timing_options(bench.sampling)
        methods = [bench.triple(one) for one in chosen]
        jobs = make_jobs(bench.pair.target, bench.target, methods, prompts, options)
        plain, *runs = run_interleaved(jobs, len(prompts), options, bench.target.device, True, size)
        waves = make_waves(len(prompts), size, options.wave_batches)
        tokens = np.array([len(output.tokens) for output in plain.outputs], dtype=np.float64)
        alone = prices.plain_list_seconds(tokens, before, size, waves)
        for one, run in zip(chosen, runs, strict=True):
            counts = PolicyCounts.stack(
                [
                    count_decoded(bench, one, prompt, output)
                    for prompt, output in zip(prompts, run.outputs, strict=True)
                ]
            )
            seconds = prices.list_seconds(counts, 0, one, size, waves)
            checked = CheckedPolicy(
                name=one.name,
                batch_size=size,
                predicted=float(counts.tokens.sum()) / seconds,
                decoded=_tokens_per_second(run),
                plain_predicted=float(tokens.sum()) / alone,
                plain_decoded=_tokens_per_second(plain),
            )
            found.append(checked)
    return found


def count_decoded(
    bench: Workbench, candidate: AnyCandidate, prompt: Prompt, output: Output
) -> PolicyCounts:
    """What a candidate spent on a prompt that it decoded, [1, 1] each."""
    before = len(prompt.source.prefix)
    if isinstance(candidate, Played):
        return count_output(output, before, bench.drafters)
    limit = bench.limits(prompt.source, len(output.tokens))
    return count_chain(output, before, limit, candidate, bench.drafting)


def _tokens_per_second(run: Decoded) -> float:
    return float(sum(len(output.tokens) for output in run.outputs) / run.cost_seconds.sum())


def all_candidates(
    settings: TuneConfig,
    heads: list[str],
    draft_cost: float,
    verifiers: Sequence[VerifierOfChains],
) -> list[Candidate]:
    """Every policy to replay. draft_cost: what a drafted token costs in target calls."""
    by_rows = {
        "entropy": settings.entropy,
        "cumulative": settings.cumulative,
        "logistic": settings.h,
        "bandit": (max(round(draft_cost, 3), 0.001),),
    }
    ways = (heads, settings.h, settings.max_draft, verifiers)
    return candidates_of(settings.lengths, by_rows, *ways)


def replayed(
    bench: Workbench, choice: Choice, counts: PolicyCounts, prompts: PromptSet
) -> Replayed:
    """The metrics of all candidates on the prompts that were counted."""
    tosses = bench.trace_options().tosses
    return Replayed(
        data=data_facts(prompts),
        tokens=int(counts.tokens[:, 0].sum()) // tosses,
        replicates=tosses,
        policies=policy_results(
            counts, choice.candidates, choice.prices, choice.fixed, bench.settings.bootstrap
        ),
    )
