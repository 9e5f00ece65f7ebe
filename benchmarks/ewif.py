"""Expected walltime improvement of cascades (CS Drafting, Section 4).

    python benchmarks/ewif.py ACCEPTANCE,COST,TOKENS [ACCEPTANCE,COST,TOKENS ...]
    python benchmarks/ewif.py 0.73,0.022,5 0.65,0.0068,3   # a row of the paper's Table 1

Prints the expected improvement of a horizontal cascade of these drafters, in order. Acceptance of
each position is taken to be a coin of its own; costs are those of one call of a drafter over one of
the target, as parameters or as measured times.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def expected_improvement(acceptance: Sequence[float], costs: Sequence[float]) -> float:
    """EWIF of a draft whose i-th token is accepted with acceptance[i] if all before it were.

    Chen et al. 2024, Theorem 4.1: (sum over i = 0..k of a_1 ... a_i) / (1 + sum of c_i): expected
    tokens a round over its time in target calls. costs[i]: of drafting token i. Raises ValueError
    for lists of unequal lengths or values out of range.
    """
    if len(acceptance) != len(costs):
        raise ValueError(f"{len(acceptance)} acceptances and {len(costs)} costs; give one a token")
    if any(not 0.0 <= a <= 1.0 for a in acceptance) or any(c < 0.0 for c in costs):
        raise ValueError(
            f"acceptance = {list(acceptance)} must lie in 0..1 and costs = {list(costs)} be 0 or "
            "more"
        )
    return sum(accumulate(acceptance, mul, initial=1.0)) / (1.0 + sum(costs))


def expected_improvement_of_chain(acceptance: float, cost: float, k: int) -> float:
    """The same of k tokens of one drafter: (1 - a^(k+1)) / ((1 - a) (1 + k c)).

    Leviathan et al. 2023, Theorem 3.8; the corollary of Theorem 4.1 for equal drafters.
    """
    if acceptance == 1.0:
        return (k + 1) / (1.0 + k * cost)
    return (1.0 - acceptance ** (k + 1)) / ((1.0 - acceptance) * (1.0 + k * cost))


def horizontal_improvement(parts: Sequence[tuple[float, float, int]]) -> float:
    """EWIF of a horizontal cascade: (acceptance, cost, tokens) of each drafter, in order."""
    acceptance = [a for a, _, count in parts for _ in range(count)]
    costs = [c for _, c, count in parts for _ in range(count)]
    return expected_improvement(acceptance, costs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", type=read_part, metavar="ACCEPTANCE,COST,TOKENS")
    try:
        print(f"{horizontal_improvement(parser.parse_args().parts):.4f}")
    except ValueError as error:
        parser.error(str(error))


def read_part(text: str) -> tuple[float, float, int]:
    """`0.73,0.022,5` as its numbers; argparse makes a message of the ValueError."""
    acceptance, cost, tokens = text.split(",")
    return float(acceptance), float(cost), int(tokens)


if __name__ == "__main__":
    main()
