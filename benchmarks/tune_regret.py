"""Check whether tune's choice is the fastest of its candidates on unseen prompts.

    python benchmarks/tune_regret.py checkpoints/quickstart-heads/tune.json \\
        heads=checkpoints/quickstart-heads data.path=data/gsm8k/test.jsonl.gz data.skip=100 \\
        data.limit=60

Decodes these prompts with all candidates of the report, interleaved with plain decoding, and prints
the regret of the choice for each batch size: how much slower it is than the fastest candidate, with
a 95 % interval paired by prompt. The choice is right if it is within 2 % of the fastest, or if the
interval contains 0. The fastest of many candidates is partly so by chance, so the regret is
overestimated. Settings are those of `drafttrain tune`: heads= or drafter=, target.path=,
data.path=, ....
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from drafttrain.build.pairing import check_methods
from drafttrain.build.pairs import load_pair
from drafttrain.commands.shell import quiet_libraries
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.reading import load_settings
from drafttrain.config.runs import fill_tune
from drafttrain.data.inputs.prompts import load_inputs
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.evaluation.report import Choice, Tried, read_report
from drafttrain.evaluation.runner import PLAIN
from drafttrain.evaluation.tune import Bench, compare, decode_all
from drafttrain.evaluation.tune_plan import Candidate

SEED = 1000
"""First seed; differs from the seeds that tune has used."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("report", type=Path, help="tune.json")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of tune")
    parser.add_argument("--rounds", type=int, default=1, help="how often to decode each prompt")
    given = parser.parse_args(arguments)
    quiet_libraries()
    report = read_report(given.report)
    assert report.search is not None, "the report is of `drafttrain eval`"
    settings = load_settings(TuneConfig, None, given.settings, {}, fill_tune)
    candidates = read_candidates(settings, report.search.candidates)
    bench = open_bench(settings, candidates)
    for choice in report.search.choices:
        tried = decode_everything(bench, choice.batch_size, given.rounds)
        print(f"\nbatch size {choice.batch_size}, {len(bench.prompts)} prompts, tokens per second")
        print_regret(choice, tried)


def read_candidates(settings: TuneConfig, known: dict[str, dict]) -> list[Candidate]:
    """Returns the report's candidates with the drafter and sampling of the settings."""
    common = {"drafter": settings.drafter, "sampling": settings.sampling}
    return [Candidate(name, DecodeConfig(**common, **values)) for name, values in known.items()]


def open_bench(settings: TuneConfig, candidates: list[Candidate]) -> Bench:
    pair = load_pair(settings.target, *check_methods(*(one.decode for one in candidates)))
    prompts, _ = read_prompts(pair, load_inputs(settings.data))
    return Bench(pair, candidates, prompts, settings)


def decode_everything(bench: Bench, batch_size: int, rounds: int) -> dict[str, Tried]:
    """Decodes all prompts with all candidates and plain decoding, after a warm-up batch."""
    names, rows = [PLAIN, *bench.methods], range(len(bench.prompts))
    decode_all(bench, batch_size, names, rows[:batch_size], 0)
    turns = [
        decode_all(bench, batch_size, names, rows, turn) for turn in range(SEED, SEED + rounds)
    ]
    return compare({name: sum(turn[name] for turn in turns) for name in names})


def print_regret(choice: Choice, tried: dict[str, Tried]) -> None:
    [(best, fastest), *_] = tried.items()
    for name, one in tried.items():
        speed, against = one.tokens_per_second, one.against_best
        marks = [mark for mark, value in vars(choice).items() if value == name]
        print(
            f"  {name:28} {speed.value:8.1f} ({speed.low:.1f}-{speed.high:.1f})"
            f"  {against.value:.3f} ({against.low:.3f}-{against.high:.3f})  {' '.join(marks)}"
        )
    chosen = tried[choice.best].against_best
    ratios = chosen.value, chosen.high, chosen.low
    regret, low, high = (100.0 * (1.0 - ratio) for ratio in ratios)
    verdict = "right" if regret <= 2.0 or low <= 0.0 else "WRONG"
    print(
        f"choice {choice.best}: regret {regret:.1f} % ({low:.1f} to {high:.1f}) against {best} "
        f"({fastest.tokens_per_second.value:.0f} tokens/s): {verdict}"
    )


if __name__ == "__main__":
    main()
