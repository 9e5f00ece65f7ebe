"""Outputs whose rounds take known times."""

from drafttrain.decoding.types import Output, Round


def run_of(k: int, rounds: int, t_draft: float, t_target: float, constant: float) -> Output:
    """One prompt decoded in rounds of k drafted tokens that take known times."""
    played = [
        Round(0, range(k), range(1), range(2), k, k * t_draft, t_target) for _ in range(rounds)
    ]
    return Output(list(range(2 * rounds)), played, rounds * (k * t_draft + t_target) + constant)


def played(k: int, rounds: int, shared_by: int = 2) -> Output:
    """One sequence whose rounds take 3 + 2 k + 1 a row more + 0.01 a token in front (and of the
    drafter's calls 0.001), the first one 9 more."""
    found, front = [], 4
    for number in range(rounds):
        found.append(
            Round(
                0, range(k), range(1), range(2), k, 2.0 * k + 0.001 * k * front,
                3.0 + k + 0.01 * front + (9.0 if number == 0 else 0.0), shared_by=shared_by,
            )
        )  # fmt: skip
        front += 2
    seconds = sum(round.draft_seconds + round.target_seconds for round in found)
    return Output(list(range(2 * rounds)), found, seconds)
