"""How much could any acceptance head gain over the best fixed length?

    python benchmarks/known_acceptance.py --cache RUN/held_out_cache --heads RUN \
        --t-draft 0.0018 --t-target 0.0143

A head can at most know the probability P_i with which each drafted token is accepted. This plays
rounds along the labels P_i of a hidden cache, position after position, with a coin tossed for each,
and stops by SpecDec++'s rule (with the lag of the cached states) on P_i itself, on each head's
prediction of it, and at fixed lengths. Costs are those that `drafttrain tune` prints. An upper
bound in a simplified world: the label of a position is that of one draft behind the target's own
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafttrain.commands.shell import quiet_libraries
from drafttrain.data.shards.states import open_cache
from drafttrain.evaluation.bootstrap import Ratio, draw_resamples, estimate_quotient
from drafttrain.models.acceptance_head import load_heads

THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
MOST = 20


@dataclass(frozen=True)
class Costs:
    """Seconds of a drafter pass and of a target call."""

    draft: float
    target: float


@dataclass(frozen=True)
class Rule:
    """Draft until the predicted probability of a rejection passes h, at most `most` tokens."""

    h: float
    most: int
    lag: int = 0
    """Tokens drafted behind one before anything is known of it."""


def play(accepted: np.ndarray, known: np.ndarray, rule: Rule, costs: Costs) -> tuple[int, float]:
    """Tokens and seconds of the rounds along one output. Shapes: accepted [L], known [L]."""
    tokens, seconds, start = 0, 0.0, 0
    while start < len(accepted):
        survival, drafted = 1.0, 0
        while drafted < rule.most and start + drafted < len(accepted):
            if drafted > rule.lag:
                survival *= known[start + drafted - 1 - rule.lag]
            if 1.0 - survival > rule.h:
                break
            drafted += 1
        run = 0
        while run < drafted and accepted[start + run]:
            run += 1
        tokens, seconds = tokens + run + 1, seconds + drafted * costs.draft + costs.target
        start += run + 1
    return tokens, seconds


def rate(rows: Sequence[tuple[np.ndarray, np.ndarray]], rule: Rule, costs: Costs) -> Ratio:
    """Tokens over seconds, an entry a row."""
    played = [play(accepted, known, rule, costs) for accepted, known in rows]
    return Ratio(*(np.array(values, dtype=np.float64) for values in zip(*played, strict=True)))


def total(ratio: Ratio) -> float:
    return float(ratio.numerators.sum() / ratio.denominators.sum())


def cut(values: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    yield from np.split(values, np.cumsum(lengths)[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="hidden cache to play along")
    parser.add_argument("--heads", type=Path, help="a head, or a run of heads")
    parser.add_argument("--t-draft", type=float, required=True, help="seconds of a drafter pass")
    parser.add_argument("--t-target", type=float, required=True, help="seconds of a target call")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    quiet_libraries()
    costs = Costs(options.t_draft, options.t_target)
    cache = open_cache(options.cache)
    lengths = cache.lengths(0)
    hidden, labels = cache.read(0, range(len(lengths)))
    probability = labels.numpy().astype(np.float64)
    coins = np.random.default_rng(options.seed).random(len(probability)) < probability
    accepted = list(cut(coins, lengths))

    def rows(known: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return list(zip(accepted, cut(known, lengths), strict=True))

    lag = 1 if cache.manifest.state == "token" else 0
    fixed = {k: rate(rows(probability), Rule(1.0, k), costs) for k in LENGTHS}
    best = max(fixed, key=lambda k: total(fixed[k]))
    print(f"{len(lengths)} outputs, mean acceptance {probability.mean():.3f}, best fixed k={best}")
    resamples = draw_resamples(len(lengths), 1000)
    predictions = {"known": probability}
    if options.heads is not None:
        with torch.inference_mode():
            for name, head in load_heads(options.heads).items():
                predictions[name] = head.acceptance(hidden.float()).double().numpy()
    for name, known in predictions.items():
        tried = {h: rate(rows(known), Rule(h, MOST, lag), costs) for h in THRESHOLDS}
        h = max(tried, key=lambda h: total(tried[h]))
        gain = estimate_quotient(tried[h], fixed[best], resamples)
        correlation = np.corrcoef(known, probability)[0, 1]
        print(
            f"{name:8} h={h:g}  correlation {correlation:.2f}  gain {gain.value - 1:+.1%} "
            f"({gain.low - 1:+.1%} to {gain.high - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
