"""Chooses how to draft by successive halving: candidates decode in rungs, the slower half leaves.

A rung decodes new prompts, twice as many as the one before, with every remaining candidate and
compares candidates on all prompts so far, paired by prompt. Prompts are reused only after all were
decoded, then with other seeds. The final measurements are made by `evaluate` on other prompts.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter

import numpy as np
from datasets import Dataset

from drafttrain.build.method import Method, build_method
from drafttrain.build.pairs import Pair
from drafttrain.config.base import counted
from drafttrain.config.command_line import hide_folders
from drafttrain.config.commands import EvalConfig, TuneConfig
from drafttrain.config.decode import DecodeConfig, SamplingConfig
from drafttrain.config.methods import STOPS
from drafttrain.config.policy import Policy, dump_policy
from drafttrain.data.shards.writing import say, write_file
from drafttrain.decoding.types import Sampling
from drafttrain.evaluation.bootstrap import Array, Ratio, draw_resamples, estimate, quotient
from drafttrain.evaluation.evaluate import Evaluation, evaluate
from drafttrain.evaluation.metrics import count_rounds
from drafttrain.evaluation.prompts import Prompt
from drafttrain.evaluation.report import Choice, Report, Rung, Tried, standings
from drafttrain.evaluation.runner import PLAIN, make_jobs, run_interleaved
from drafttrain.evaluation.tune_plan import Candidate

FIRST = 8
"""Number of prompts of the first rung at batch size 1."""
FEWEST = 4
"""Minimal number of prompts of a rung at batch size 1."""
FINALISTS = 4
FINAL_SHARE = 0.25
"""Share of the time that is reserved for the final measurements."""

FACTS = ("tokens", "seconds", "rounds", "drafted", "accepted")
Facts = Array
"""[FACTS, P] sums of a candidate for P prompts."""
DecodeAll = Callable[[Sequence[str], Sequence[int], int], Mapping[str, Facts]]
"""(candidate names, prompt indices, turn) -> Facts by name, from interleaved decoding."""
Left = Callable[[], float]
"""Returns the remaining seconds."""


def compare(facts: Mapping[str, Facts]) -> dict[str, Tried]:
    """Compares candidates that decoded the same prompts; fastest first, all marked as staying."""
    resamples = draw_resamples(next(iter(facts.values())).shape[1])
    totals = {name: sums.sum(axis=1) for name, sums in facts.items()}
    order = sorted(facts, key=lambda name: -totals[name][0] / totals[name][1])
    speeds, tried = {name: Ratio(*facts[name][:2]) for name in order}, {}
    for name in order:
        tokens, _, rounds, drafted, accepted = totals[name]
        tried[name] = Tried(
            tokens_per_second=estimate(speeds[name], resamples),
            against_best=estimate(quotient(speeds[name], speeds[order[0]]), resamples),
            discard_rate=(drafted - accepted) / tokens,
            verification_rate=rounds / tokens,
            stays=True,
        )
    return tried


def halve(tried: Mapping[str, Tried], fixed: Collection[str]) -> dict[str, Tried]:
    """Marks the slower half as leaving; the fastest fixed length always stays.

    Candidates that are significantly slower than the fastest (their paired interval is below 1)
    leave before others, whatever their speed. tried: fastest first.
    """
    kept = next((name for name in tried if name in fixed), None)
    others = [name for name in tried if name != kept]
    others.sort(key=lambda name: tried[name].against_best.high < 1.0)  # stable
    staying = {kept, *others[: (len(others) + 1) // 2]}
    return {name: one.model_copy(update={"stays": name in staying}) for name, one in tried.items()}


def search(
    names: Sequence[str],
    fixed: Collection[str],
    prompts: int,
    decode: DecodeAll,
    left: Left,
    first_seconds: float,
    batch_size: int = 1,
    required: bool = False,
) -> list[Rung]:
    """Runs the rungs at a batch size until at most the fastest candidate and the best fixed length
    remain, and one is significantly faster or all prompts were decoded.

    fixed: names of fixed lengths. first_seconds: estimated time of all candidates per prompt for
    the first rung. If time is short, the remaining rungs share it equally and have fewer prompts;
    the search ends at a rung for which it is too short. required: the first rung has the fewest
    prompts then.
    """
    order, alive, rungs = np.random.default_rng(0).permutation(prompts), list(names), []
    sums = {name: np.zeros((len(FACTS), prompts)) for name in names}
    fewest, size = (FEWEST, FIRST) if batch_size == 1 else (batch_size, max(FIRST, 4 * batch_size))
    seconds, decoded = first_seconds, 0
    while True:
        turn, start = divmod(decoded, prompts)
        share = left() / max(1.0, np.ceil(np.log2(len(alive))))  # of each remaining rung
        least, count = min(fewest, prompts - start), min(size, prompts - start)
        if least * seconds > left():
            if rungs or not required:
                break
            say(
                f"minutes is too small: all {len(names)} candidates together take {seconds:.0f} s "
                f"a prompt, and {counted(least, 'prompt')} are decoded all the same; give more "
                "minutes, or fewer candidates (sweep, trees=[])"
            )
        count = min(count, max(least, int(share / seconds)))
        rows = order[start : start + count].tolist()
        for name, facts in decode(alive, rows, turn).items():
            sums[name][:, rows] += facts
        decoded, size = decoded + count, 2 * size
        tried = halve(compare({name: sums[name][:, order[:decoded]] for name in alive}), fixed)
        tokens = sums[next(iter(tried))][0].sum() / decoded
        rungs.append(Rung(batch_size=batch_size, prompts=decoded, tokens=tokens, candidates=tried))
        print_rung(rungs[-1])
        alive = [name for name, one in tried.items() if one.stays]
        seconds = sum(sums[name][1].sum() for name in alive) / decoded
        in_doubt = any(one.against_best.high >= 1.0 for one in list(tried.values())[1:])
        if len(alive) == 1 or (len(alive) == len(tried) and not (in_doubt and decoded < prompts)):
            break
    return rungs


def choose(rungs: Sequence[Rung], candidates: Sequence[Candidate]) -> list[Choice]:
    """Chooses at each batch size the fastest candidate of the last rung, and of each kind of
    candidate the fastest of those that stayed longest."""
    kinds = {
        "best_chain": [one.name for one in candidates if one.is_chain],
        "best_fixed": [one.name for one in candidates if one.is_fixed],
        "best_head": [one.name for one in candidates if one.head is not None],
    }
    choices = []
    for size in sorted({rung.batch_size for rung in rungs}):
        order = list(standings(rungs, size))
        best = {kind: next((n for n in order if n in kinds[kind]), None) for kind in kinds}
        choices.append(Choice(batch_size=size, best=order[0], **best))
    return choices


@dataclass(frozen=True)
class Bench:
    """Models, candidates and prompts of a tuning run."""

    pair: Pair
    candidates: Sequence[Candidate]
    prompts: Sequence[Prompt]
    """The prompts used for the choice."""
    settings: TuneConfig

    @cached_property
    def methods(self) -> dict[str, Method]:
        """The candidates' methods by candidate name."""
        built = ((one.name, build_method(one.decode, self.pair)) for one in self.candidates)
        return {name: replace(method, label=name) for name, method in built}


def search_all(bench: Bench, left: Left) -> list[Rung]:
    """Runs a search at every batch size, each with an equal share of the remaining time; skips
    batch sizes but the first for which there is no time."""
    fixed = [one.name for one in bench.candidates if one.is_fixed]
    names, sizes = [PLAIN, *(one.name for one in bench.candidates)], bench.settings.batch_sizes
    rungs: list[Rung] = []
    for done, size in enumerate(sizes):
        decode, prompts = partial(decode_all, bench, size), len(bench.prompts)
        share = time_left(left() / (len(sizes) - done))
        if bench.pair.model.engine.compiled is not None:
            decode(names, range(size), 0)  # compiles the shapes that occur
        began = perf_counter()
        decode(names, range(size), 0)  # warm-up before anything is timed
        warmed = (perf_counter() - began) / size
        new = search(names, fixed, prompts, decode, share, warmed, size, required=not rungs)
        if not new:
            say(f"no time for batch size {size}: it is left out")
        rungs += new
    return rungs


def time_left(seconds: float) -> Left:
    """Starts a countdown."""
    deadline = perf_counter() + seconds
    return lambda: deadline - perf_counter()


def eval_settings(settings: TuneConfig, turn: int = 0, **given: object) -> EvalConfig:
    """Returns the settings of the final measurements and of candidates, whose later turns sample
    with other seeds."""
    sampling = settings.sampling.model_copy(update={"seed": settings.sampling.seed + turn})
    return EvalConfig(
        data=settings.report_data or settings.data,
        decode=DecodeConfig(sampling=sampling),
        baselines=(),
        compile=settings.compile,
        repeats=1,
        **given,
    )


def decode_all(
    bench: Bench, batch_size: int, names: Sequence[str], rows: Sequence[int], turn: int
) -> dict[str, Facts]:
    """Decodes prompts with candidates, interleaved; each turn samples with another seed."""
    settings = eval_settings(bench.settings, turn, warmup=0)
    methods = [bench.methods[name] for name in names if name != PLAIN]
    jobs = [job for job in make_jobs(bench.pair, methods, settings) if job.name in names]
    prompts, device = [bench.prompts[row] for row in rows], bench.pair.model.device
    found = {}
    for run in run_interleaved(jobs, prompts, settings, device, batch_size=batch_size):
        counts = count_rounds(run.outputs)
        facts = counts.tokens, run.cost_seconds, counts.rounds, counts.drafted, counts.accepted
        found[run.job.name] = np.stack(facts)
    return found


def print_rung(rung: Rung) -> None:
    best, tried = next(iter(rung.candidates.items()))
    left = sum(one.stays for one in rung.candidates.values())
    say(
        f"batch size {rung.batch_size}, {counted(rung.prompts, 'prompt')}, "
        f"{counted(len(rung.candidates), 'candidate')}: {best} is fastest, "
        f"{tried.tokens_per_second.value:.0f} tokens/s; {left} stay"
    )


def finalists(rungs: Sequence[Rung], choices: Sequence[Choice]) -> list[str]:
    """Returns the names for the final measurements, without plain decoding: at each batch size the
    choices, then candidates of the last rung, at most FINALISTS together."""
    found: dict[str, None] = {}
    last = {rung.batch_size: rung for rung in rungs}
    for one in choices:
        names = (one.best, one.best_fixed, one.best_head, *last[one.batch_size].candidates)
        drafting = [name for name in dict.fromkeys(names) if name not in (None, PLAIN)]
        found |= dict.fromkeys(drafting[:FINALISTS])
    return list(found)


def measure_finalists(
    bench: Bench, names: Sequence[str], rows: Dataset, rungs: Sequence[Rung], left: Left
) -> Evaluation:
    """Measures the finalists and plain decoding on as many rows as there is time for."""
    sizes = sorted({rung.batch_size for rung in rungs})
    last = [standings(rungs, size)[name] for size in sizes for name in (PLAIN, *names)]
    each = sum(rung.tokens / one.tokens_per_second.value for rung, one in last)
    fewest, fits = max(FIRST, 4 * max(sizes)), int(left() / each)
    rows = rows.select(range(min(len(rows), max(fewest, fits))))
    settings = eval_settings(bench.settings, batch_sizes=sizes, warmup=1)
    methods = [bench.methods[name] for name in names]
    return evaluate(bench.pair, methods, rows, settings, progress=True)


def policy_of(
    choice: Choice, candidates: Mapping[str, Candidate], sampling: dict[str, float]
) -> Policy:
    """Returns the policy of a batch size: the best chain; the best head with its h and max_draft,
    also if the chain does not use it; a tree or cascade if it is the fastest; and `speculate`,
    False if plain decoding is the fastest."""
    chain = candidates[str(choice.best_chain)]
    stop, values, method = chain.decode.stop, {}, None
    if choice.best_head is not None:
        judge = candidates[choice.best_head if chain.head is None else chain.name]
        values = judge.decode.stop.model_dump(include={"h", "max_draft"}) | {"head": judge.head}
    varied = {*(stop.model_fields_set - {"kind", "head"}), STOPS[stop.kind].varied}
    if choice.best not in (PLAIN, chain.name):
        method = DecodeConfig.model_validate(candidates[choice.best].settings())
    return Policy(
        stop=stop.kind,
        sampling=sampling,
        verifier=chain.decode.verifier,
        method=method,
        speculate=choice.best != PLAIN,
        **values | {name: getattr(stop, name) for name in varied},
    )


def write_policy(
    report: Report, candidates: Sequence[Candidate], sampling: SamplingConfig, file: Path
) -> None:
    """Writes policy.json: the policy of the smallest batch size, those of the other sizes in its
    `batches`, and the machine, models, data and speedup of the measurement."""
    search, by_name = report.search, {one.name: one for one in candidates}
    assert search is not None
    prompts = counted(report.data.prompts, "prompt")
    facts = {
        "machine": report.environment.gpu or report.environment.cpu,
        "target": hide_folders(report.target.path),
        "drafter": hide_folders(search.drafter),
        "measured_on": hide_folders(f"{prompts} of {report.data.path}"),
        "speedup": asdict(report.run(search.choices[0].best).metrics["speedup"]),
    }
    drawn = asdict(Sampling.of(sampling))
    found = {one.batch_size: policy_of(one, by_name, drawn) for one in search.choices}
    policy = found.pop(search.choices[0].batch_size).model_copy(update={"batches": found})
    content = json.dumps(dump_policy(policy) | facts, indent=2, ensure_ascii=False)
    write_file(file, content + "\n")
