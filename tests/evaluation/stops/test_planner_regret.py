"""What choosing by replay loses against trying everything on the prompts that count."""

import numpy as np
import torch

from drafttrain.evaluation.stops.costs import Prices
from drafttrain.evaluation.stops.policy_results import CHOSEN, best_of, candidates_of, throughput
from drafttrain.evaluation.stops.replay import PolicyCounts, replay
from drafttrain.evaluation.stops.round_costs import Curve, RoundCosts
from drafttrain.evaluation.stops.trace import AcceptedPath, Trace, WrongBranch, join, run_lengths

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
