"""What a token drafted by Max-Gram costs, on histories of some length.

    python benchmarks/max_gram.py --history 1000 8000 32000

The history is random tokens of which 70 % are copied from 3,000 tokens before, so that matches of
all lengths occur; each round appends three tokens and drafts ten. The first draft, which reads the
whole history, is timed apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
from time import perf_counter

import torch

from drafttrain.decoding.drafters.max_gram import MaxGramDrafter
from drafttrain.decoding.roles import DraftSession
from drafttrain.decoding.stopping import FixedLength
from drafttrain.decoding.types import Sampling, Source
from drafttrain.evaluation.table_style import markdown

COPIED_FROM, COPIED_SHARE, ACCEPTED, DRAFTED = 3_000, 0.7, 3, 10


def make_text(length: int, vocabulary: int) -> torch.Tensor:
    randomness = random.Random(0)
    tokens = [randomness.randrange(vocabulary) for _ in range(length)]
    for place in range(COPIED_FROM, length):
        if randomness.random() < COPIED_SHARE:
            tokens[place] = tokens[place - COPIED_FROM]
    return torch.tensor(tokens)


@torch.inference_mode()
def measure(history: int, vocabulary: int, rounds: int) -> tuple[float, list[float]]:
    """Seconds of the first draft, and seconds a drafted token of each later one."""
    tokens = make_text(history + ACCEPTED * rounds, vocabulary)
    table = [random.Random(1).randrange(vocabulary) for _ in range(vocabulary)]
    prompt = tokens[:history]
    session = MaxGramDrafter(table).open(Source.of_text(prompt, prompt), Sampling(), None)
    first, _ = timed_draft(session, prompt)
    found = []
    for played in range(1, rounds + 1):
        seconds, drafted = timed_draft(session, tokens[: history + ACCEPTED * played])
        found.append(seconds / drafted)
    return first, found


def timed_draft(session: DraftSession, tokens: torch.Tensor) -> tuple[float, int]:
    began = perf_counter()
    proposal = session.propose(tokens, None, FixedLength(DRAFTED))
    return perf_counter() - began, len(proposal.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--history", type=int, nargs="+", default=[1_000, 8_000, 32_000])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[50, 2_000, 32_000])
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for history in arguments.history:
        for vocabulary in arguments.vocabulary:
            first, seconds = measure(history, vocabulary, arguments.rounds)
            cuts = statistics.quantiles(seconds, n=20)
            figures = [statistics.median(seconds), cuts[0], cuts[-1]]
            shown = [f"{1e6 * figure:.1f}" for figure in figures]
            rows.append([f"{history:,}", f"{vocabulary:,}", *shown, f"{1e3 * first:.0f}"])
    header = ["history", "vocabulary", "µs a drafted token", "5 %", "95 %", "first draft, ms"]
    print(markdown(header, rows, names=2))


if __name__ == "__main__":
    main()
