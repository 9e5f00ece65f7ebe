"""What choosing by replay loses against trying everything on the prompts that count."""

import numpy as np
import torch

from drafttrain.decoding.types import Calls, Output, Round
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.played.costs import MethodCosts
from drafttrain.evaluation.played.counts import DRAFTING, count_output
from drafttrain.evaluation.played.halving import Halving, halve
from drafttrain.evaluation.played.increments import Increments
from drafttrain.evaluation.stops.choice import rank_played
from drafttrain.evaluation.stops.policy_results import CHOSEN, best_of, candidates_of, throughput
from drafttrain.evaluation.stops.prices import AnyCandidate, Prices
from drafttrain.evaluation.stops.replay import PolicyCounts, replay
from drafttrain.evaluation.stops.round_costs import Curve, RoundCosts
from drafttrain.evaluation.stops.trace import AcceptedPath, Trace, WrongBranch, join, run_lengths
from tests.evaluation.played.pairs import cascade, tree

DEPTH, TABLES, PROMPTS, CHOOSING = 12, 100, 160, 60
NATS = (0.3, 0.6, 0.9, 1.2, 1.5, 2.0, 2.5)
LEAST = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
CANDIDATES = candidates_of(range(1, DEPTH + 1), {"entropy": NATS, "cumulative": LEAST}, [], [], 12)


def made_up(generator: np.random.Generator) -> Trace:
    """An output of easy and hard stretches, which rows tell apart more or less."""
    length = int(generator.integers(24, 64))
    likely = np.repeat(generator.beta(3.0, 1.2, (length + 5) // 6), 6)[:length]
    accepted = generator.random(length) < likely
    largest = np.clip(likely + 0.15 * generator.standard_normal(length), 0.02, 0.999)
    rows = np.stack([3.0 * (1.0 - largest), largest], axis=1)
    path = AcceptedPath(
        limit=length - 1 - np.arange(length),
        ends=np.zeros(length, dtype=bool),
        lag=0,
        states=torch.zeros(length, 1),
        rows=torch.from_numpy(rows),
        before=20,
    )
    wrong = [
        WrongBranch(
            at, DEPTH, [0] * DEPTH, [(2.0, 0.3)] * DEPTH, frozenset(),
            states=[torch.zeros(1)] * (DEPTH - 1),
        )
        for at in np.flatnonzero(~accepted).tolist()
    ]  # fmt: skip
    return join(path, run_lengths(accepted[None]), [wrong], DEPTH)


def random_costs(generator: np.random.Generator) -> RoundCosts:
    """A drafter of 0.3 to 100 % of the target, rows that cost nothing or up to a call."""
    draft = 10.0 ** generator.uniform(-2.5, 0.0)
    row = float(generator.choice([0.0, 10.0 ** generator.uniform(-3.0, 0.0)]))
    bend = float(generator.integers(2, DEPTH))
    history = 10.0 ** generator.uniform(-5.0, -3.0)
    return RoundCosts(
        batch_size=1,
        draft=Curve(0.0, (0.0,), (draft,), draft * history),
        target=Curve(1.0, (1.0, bend), (row * generator.random(), row), history),
        constant=float(generator.uniform(0.0, 5.0)),
        plain_tokens_per_second=1.0,
        error=0.0,
    )


BRANCHING = [tree(kind="opt-tree", nodes=nodes) for nodes in (2, 4, 8, 16, 24, 32)]
LEVELS = [tree(levels=levels, kind="binary", nodes=nodes) for nodes in (6, 14) for levels in (2, 3)]
CASCADES = [
    cascade(Increments(((first, second, 0), (0, 0), (0,))))
    for first in (1, 2, 4, 8)
    for second in (0, 2, 4, 8)
]
PLAYED = [*BRANCHING, *LEVELS, *CASCADES]


def made_up_output(one: Played, generator: np.random.Generator) -> Output:
    """The same output, of the same coins, drafted for by a tree (more of a level: more often right)
    or by two drafters in turn (the second one less often right)."""
    length = int(generator.integers(24, 64))
    likely = np.repeat(generator.beta(3.0, 1.2, (length + 5) // 6), 6)[:length]
    coins, rounds, at = generator.random(length), [], 0
    while at < length:
        if one.kind == "tree":
            levels = one.decode.stop.k if one.decode.stop.kind == "fixed" else 4
            width, calls = max(1.0, one.nodes / levels), None
            right = 1.0 - (1.0 - likely[at : at + levels]) ** (0.5 + 0.5 * width)
        else:
            first, second, _ = one.decode.cascade.matrix()[0]
            right = (
                likely[at : at + first + second]
                * np.repeat([1.0, 0.8], [first, second])[: length - at]
            )
            levels, calls = first + second, {"a": Calls(first, 0.0), "b": Calls(second, 0.0)}
        said_no = coins[at : at + len(right)] >= right
        accepted = int(said_no.argmax()) if said_no.any() else len(right)
        emitted = min(accepted + 1, length - at)
        drafted, path = [0] * one.nodes, range(accepted)
        rounds.append(
            Round(0, drafted, path, [0] * emitted, passes=levels, depth=levels, calls=calls)
        )
        at += emitted
    return Output(rounds=rounds)


def random_method(way: str, costs: RoundCosts, generator: np.random.Generator) -> MethodCosts:
    """A tree or a cascade of the same target: calls of the drafter, or of two."""
    call = float(costs.draft.at(1.0))
    seconds = dict.fromkeys((*DRAFTING, "a", "b"), 0.0)
    if way == "cascade":
        seconds |= {"a": call, "b": call * generator.random()}
    else:
        seconds |= {"passes": call * (1.0 + generator.random()), "tokens": call / 20}
    return MethodCosts(way, 1, seconds, costs.target, costs.constant, 0.0)


def test_halving_loses_little_whatever_calls_cost():
    """A hundred tables of costs: trees and cascades halved on some prompts and compared with all
    chains, against the best of everything on all others."""
    generator = np.random.default_rng(1)
    chains = PolicyCounts.stack(
        [replay(made_up(np.random.default_rng([2, row])), {}, CANDIDATES) for row in range(PROMPTS)]
    )
    played = {
        one: [
            count_output(made_up_output(one, np.random.default_rng([2, row])), 20, ("a", "b"))
            for row in range(PROMPTS)
        ]
        for one in PLAYED
    }
    others = {one: PolicyCounts.stack(own[CHOOSING:]) for one, own in played.items()}
    ways = dict.fromkeys(one.way for one in PLAYED)

    def rate(counts: PolicyCounts, place: int, one: AnyCandidate, prices: Prices) -> float:
        ratio = throughput(counts, place, one, prices)
        return float(ratio.numerators.sum() / ratio.denominators.sum())

    def play(prompt: int, some: list[Played]) -> list[PolicyCounts]:
        return [played[one][prompt] for one in some]

    regrets, kinds, dropped = [], set(), []
    unseen = PolicyCounts(**{name: fact[CHOOSING:] for name, fact in vars(chains).items()})
    for _ in range(TABLES):
        costs = random_costs(generator)
        methods = {(way, 1): random_method(way, costs, generator) for way in ways}
        prices = Prices({1: costs}, methods=methods)

        def rank(counts, prices=prices):
            return [rank_played(counts, prices, 1)]

        found = halve(PLAYED, CHOOSING, play, rank, Halving(8, 4))
        chain = best_of(chains.first(CHOOSING), CANDIDATES, prices, CHOSEN)
        speeds = {chain: rate(chains.first(CHOOSING), CANDIDATES.index(chain), chain, prices)}
        speeds |= {one: rate(own, 0, one, prices) for one, own in found.finished.items()}
        best = max(speeds, key=speeds.get)
        true = {
            one: rate(unseen, place, one, prices)
            for place, one in enumerate(CANDIDATES)
            if one.kind in CHOSEN
        }
        true |= {one: rate(own, 0, one, prices) for one, own in others.items()}
        regrets.append(1.0 - true[best] / max(true.values()))
        kinds.add(best.kind)
        dropped.append(len(found.dropped))
    assert np.mean(regrets) <= 0.005 and max(regrets) <= 0.02
    assert {"tree", "cascade"} <= kinds and kinds - {"tree", "cascade"}, "one kind always wins"
    assert min(dropped) >= len(PLAYED) - 8, "all were played on all prompts"


def test_the_choice_loses_little_whatever_calls_cost():
    """A hundred tables of costs: chosen on some prompts, against the best of all on all others."""
    generator = np.random.default_rng(0)
    counts = PolicyCounts.stack(
        [replay(made_up(generator), {}, CANDIDATES) for _ in range(PROMPTS)]
    )
    places = {one: i for i, one in enumerate(CANDIDATES)}
    others = PolicyCounts(**{name: fact[CHOOSING:] for name, fact in vars(counts).items()})
    regrets, chosen = [], set()
    for _ in range(TABLES):
        prices = Prices({1: random_costs(generator)})
        speeds = {}
        for one in CANDIDATES:
            if one.kind in CHOSEN:
                ratio = throughput(others, places[one], one, prices)
                speeds[one] = ratio.numerators.sum() / ratio.denominators.sum()
        best = best_of(counts.first(CHOOSING), CANDIDATES, prices, CHOSEN)
        regrets.append(1.0 - speeds[best] / max(speeds.values()))
        chosen.add(best.name)
    assert np.mean(regrets) <= 0.005 and max(regrets) <= 0.02
    assert len(chosen) > 4, "the tables are too much alike to show anything"
