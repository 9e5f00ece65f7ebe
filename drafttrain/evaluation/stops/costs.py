"""What calls cost on this machine, and what policies cost with it.

Rounds are priced by functions of their counts (`round_costs`). For comparison with the paper, and
for thresholds that follow from it, there are also the two means of
SpecDec++ Eq. 2.1: T = t_draft N_draft + t_target N_target, fitted by least squares over decoding
runs (its Table 2), here with a constant a prompt for the encoder or the prompt's own pass. Where a
drafter makes one token a pass, N_draft counts passes and drafted tokens alike. A block drafter
makes one pass a round: t_target is then the cost of a round, its pass included, and t_draft that of
a drafted token more. A token more to verify is part of t_draft either way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter

import numpy as np
import torch

from drafttrain.build.method import build_sampling
from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.sampling import SampledRandomness
from drafttrain.decoding.stopping import Entropy, HeadPolicy
from drafttrain.decoding.types import DraftState, Output, Proposal
from drafttrain.decoding.verifiers import make_verifier
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.metrics import count_rounds, mean_target_seconds
from drafttrain.evaluation.options import timing_options
from drafttrain.evaluation.played.candidates import CASCADE, Played, timed_of
from drafttrain.evaluation.played.costs import MethodCosts, check_asked, method_costs
from drafttrain.evaluation.runner import Decoded, make_jobs, make_waves, run_interleaved
from drafttrain.evaluation.stops.replay import OF_ROWS, Candidate, PolicyCounts
from drafttrain.evaluation.stops.report import CostFacts
from drafttrain.evaluation.stops.round_costs import Curve, RoundCosts, TimedRounds, fit_rounds
from drafttrain.evaluation.stops.waves import beside_rounds, seconds_of_wave
from drafttrain.evaluation.stops.workbench import Workbench
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import ROW_FEATURES, drawn_state

AnyCandidate = Candidate | Played


TIMED = 5
"""Fixed lengths, at most, that costs are measured with."""


@dataclass(frozen=True)
class Costs:
    """Seconds, fitted and by direct means."""

    t_draft: float
    """A drafted token."""
    t_target: float
    """A target call (with its drafter pass, where one pass drafts a block)."""
    constant: float
    """A prompt, before its first round."""
    r_squared: float | None
    """Share of the variance of the prompts' seconds that the fit explains; None: no fit, the first
    two are of the rounds' own clocks."""
    runs: int
    """Decoding runs fitted: prompts times methods."""
    t_slot: float = 0.0
    """A slot of a block that is computed but not submitted."""
    draft_mean: float | None = None
    """Mean seconds of drafting over drafter passes, from the rounds' own clocks."""
    target_mean: float | None = None
    """Mean seconds of scoring and verifying over target calls."""


def fit_costs(outputs: Sequence[Output], block: bool = False, constant: bool = True) -> Costs:
    """t_draft and t_target from decoded outputs with their seconds and rounds.

    block: whether one pass drafts a block; then what a slot costs is fitted to the rounds' own
    clocks. Where other work on the machine makes one of the two come out below 0, both are of the
    rounds' own clocks instead. Raises ValueError where the runs do not tell them apart.
    """
    counts = count_rounds(outputs)
    seconds = np.array([output.seconds for output in outputs])
    columns = [counts.drafted, counts.rounds]
    if constant:
        columns.append(np.ones(len(seconds)))
    facts = np.stack(columns, axis=1)
    if np.linalg.matrix_rank(facts) < facts.shape[1]:
        raise ValueError(
            f"{len(outputs)} timed runs do not tell t_draft and t_target apart; time more prompts "
            "(timing_prompts) at more than one length (lengths)"
        )
    solution = np.linalg.lstsq(facts, seconds, rcond=None)[0]
    if constant and solution[2] < 0:  # a prompt costs nothing less than nothing
        return fit_costs(outputs, block, constant=False)
    t_draft, t_target = float(solution[0]), float(solution[1])
    before = float(solution[2]) if constant else 0.0
    residual = seconds - facts @ solution
    spread = ((seconds - seconds.mean()) ** 2).sum()
    r_squared = float(1.0 - (residual**2).sum() / spread)
    drafting, passes = float(counts.draft_seconds.sum()), float(counts.passes.sum())
    target_mean = mean_target_seconds(outputs)
    if t_draft <= 0 or t_target <= 0:
        t_draft, t_target = drafting / float(counts.drafted.sum()), target_mean
        before, r_squared = 0.0, None
    return Costs(
        t_draft=t_draft,
        t_target=t_target,
        constant=before,
        r_squared=r_squared,
        runs=len(outputs),
        t_slot=_slot_seconds(outputs) if block else 0.0,
        draft_mean=drafting / passes if passes else None,
        target_mean=target_mean,
    )


def _slot_seconds(outputs: Sequence[Output]) -> float:
    """What one slot more adds to a drafter pass; never less than nothing."""
    rounds = [round for output in outputs for round in output.rounds if round.passes]
    slots = np.array([len(round.drafted) for round in rounds], dtype=np.float64)
    seconds = np.array([round.draft_seconds for round in rounds])
    spread = ((slots - slots.mean()) ** 2).sum()
    if spread == 0.0:
        return 0.0
    return max(0.0, float(((slots - slots.mean()) * seconds).sum() / spread))


def threshold_from_costs(t_draft: float, t_target: float, delta: float = 0.0) -> float:
    """Theorem 3.1: stop when a rejection is at least as likely as (c2 + D) / (c1 + c2 + D).

    c1 = t_draft, c2 = t_target - t_draft. The condition is sufficient, and D depends on the policy
    itself: D = 0 is a starting point for h.
    """
    c1, c2 = t_draft, t_target - t_draft
    return (c2 + delta) / (c1 + c2 + delta)


def decision_seconds(policy: StopPolicy, hidden: torch.Tensor, logits: torch.Tensor) -> float:
    """Seconds that a policy takes to judge what is new to it, the median of several.

    Shapes: hidden [N, D], one more token's state or those of all slots; logits [V].
    """
    states = hidden.unbind()
    # states before the newest were judged at earlier questions (`DraftState.notes`)
    return median_seconds(
        lambda: policy.should_draft(DraftState(depth=2, logits=(logits,) * 2, hidden=states))
    )


@torch.inference_mode()
def median_seconds(work: Callable[[], object], repeats: int = 50) -> float:
    """Median time of some work, as decoding would do it."""
    times = []
    for _ in range(repeats):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return float(np.median(times))


@dataclass(frozen=True)
class RuleCost:
    """Seconds that a rule of verification takes more than token-by-token rejection."""

    call: float = 0.0
    token: float = 0.0
    """A drafted token."""


@dataclass(frozen=True)
class Prices:
    """Seconds of everything that a policy spends."""

    rounds: Mapping[int, RoundCosts]
    """By batch size."""
    heads: dict[str, float] = field(default_factory=dict)
    """What each head takes to judge a token."""
    entropy: float = 0.0
    """What policies that go by rows take for one: the entropy policy's time."""
    rules: dict[str, RuleCost] = field(default_factory=dict)
    """Those of rules other than rejection."""
    methods: Mapping[tuple[str, int], MethodCosts] = field(default_factory=dict)
    """Of what is played, by its way and the batch size."""

    def seconds(
        self, counts: PolicyCounts, place: int, candidate: AnyCandidate, batch_size: int = 1
    ) -> Array:
        """Predicted seconds of each prompt under a candidate: its rounds by their counts, a
        policy's own time, the rule's, and what a sequence takes beside them. [P]."""
        if isinstance(candidate, Played):
            return self.methods[candidate.way, batch_size].seconds(counts, place)
        costs, rule = self.rounds[batch_size], self.rules.get(candidate.verifier, RuleCost())
        computed, judged, others = counts.by_computed, counts.by_rows, batch_size - 1
        reads, read = counts.drafter_history[:, place], counts.history[:, place]
        drafting = costs.draft.total(computed[:, place], reads, others)
        judging = costs.target.total(judged[:, place], read, others)
        ruling = rule.call * counts.rounds[:, place] + rule.token * counts.drafted[:, place]
        policy = self.judging(candidate) * counts.judged[:, place]
        return drafting + judging + ruling + policy + costs.constant * counts.sequences[:, place]

    def list_seconds(
        self,
        counts: PolicyCounts,
        place: int,
        candidate: AnyCandidate,
        batch_size: int,
        waves: Sequence[Sequence[int]],
    ) -> float:
        """Predicted seconds of decoding these prompts once, in waves whose last batches are not
        full; where a prompt's outputs were played several times, of their mean."""
        sequences = counts.sequences[:, place]
        constants = {
            size: self.constant(candidate, size) for size in self.rounds if size <= batch_size
        }
        shares = {
            size: self.seconds(counts, place, candidate, size) / sequences - constant
            for size, constant in constants.items()
        }
        rounds = counts.rounds[:, place] / sequences
        known = sum(seconds_of_wave(shares, rounds, wave, batch_size) for wave in waves)
        return known + constants[batch_size] * len(sequences)

    def constant(self, candidate: AnyCandidate, batch_size: int) -> float:
        """Seconds of a sequence beside its rounds."""
        if isinstance(candidate, Played):
            return self.methods[candidate.way, batch_size].constant
        return self.rounds[batch_size].constant

    def plain_list_seconds(
        self, tokens: Array, before: Array, batch_size: int, waves: Sequence[Sequence[int]]
    ) -> float:
        """The same of plain decoding: a round a token, with so many tokens in front of them.

        Shapes: tokens [P], before [P].
        """
        read = tokens * before + tokens * (tokens - 1.0) / 2.0
        by_rows = np.stack([np.zeros_like(tokens), tokens], axis=-1)
        shares = {
            size: costs.target.total(by_rows, read)
            for size, costs in self.rounds.items()
            if size <= batch_size
        }
        known = sum(seconds_of_wave(shares, tokens, wave, batch_size) for wave in waves)
        return known + self.rounds[batch_size].constant * len(tokens)

    def judging(self, candidate: Candidate) -> float:
        """Seconds that the policy itself takes for a token."""
        if candidate.head is not None:
            return self.heads[candidate.head]
        return self.entropy if candidate.kind in OF_ROWS else 0.0


def measure_costs(bench: Workbench) -> tuple[Prices, CostFacts]:
    """What calls cost on this machine: some prompts decoded at some lengths, and by some trees and
    cascades, interleaved, at every batch size asked for."""
    lengths, played = timed_lengths(bench.settings.lengths), timed_of(bench.played)
    prompts = bench.choosing.prompts[: bench.settings.timing_prompts]
    options = timing_options(bench.sampling)
    methods = [*map(bench.method, lengths), *map(bench.triple, played)]
    jobs = make_jobs(bench.pair.target, bench.target, methods, prompts, options)
    ran = {
        size: run_interleaved(jobs, len(prompts), options, bench.target.device, True, size)
        for size in bench.batch_sizes
    }
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
    entropy = decision_seconds(Entropy(1e9, 100), *example(bench))
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


def by_way(played: Sequence[Played], runs: Sequence[Decoded]) -> dict[str, list[Decoded]]:
    """The runs of each way."""
    found: dict[str, list[Decoded]] = {}
    for one, run in zip(played, runs, strict=True):
        found.setdefault(one.way, []).append(run)
    return found


def round_costs(
    runs: Sequence[Decoded],
    before: Sequence[int],
    batch_size: int,
    reads_each: bool,
    smaller: Mapping[int, RoundCosts] | None = None,
    waves: Sequence[Sequence[int]] | None = None,
) -> RoundCosts:
    """The functions of one batch size, from plain decoding and methods of fixed lengths.

    before: tokens in front of each prompt's output. reads_each: whether a drafted token is a call.
    smaller: the functions of smaller batches, which a wave ends with; waves: the prompts of each
    (default: one each).
    """
    timed = timed_rounds(runs, before, batch_size)
    draft, target = fit_rounds(timed, reads_each)
    curves = {size: (costs.draft, costs.target) for size, costs in (smaller or {}).items()}
    curves[batch_size] = draft, target
    found = []
    for run in runs:
        facts = [rounds_of(*one) for one in zip(run.outputs, before, strict=True)]
        shares = {
            size: np.array([_seconds(own, *both, reads_each) for own in facts])
            for size, both in curves.items()
        }
        rounds = np.array([len(own.rows) for own in facts])
        found.append((run.cost_seconds, shares, rounds))
    constant, error = beside_rounds(found, batch_size, waves)
    plain, of_plain = runs[0].outputs, float(found[0][1][batch_size].sum())
    tokens = sum(len(output.tokens) for output in plain)
    speed = tokens / (of_plain + constant * len(plain))
    return RoundCosts(batch_size, draft, target, constant, speed, error)


def _seconds(facts: TimedRounds, draft: Curve, target: Curve, reads_each: bool) -> float:
    """What the rounds of one output take by these functions."""
    reads = facts.history * (facts.computed if reads_each else facts.computed > 0)
    known = draft.total(np.bincount(facts.computed), reads.sum())
    return float(known + target.total(np.bincount(facts.rows), facts.history.sum()))


def timed_rounds(runs: Sequence[Decoded], before: Sequence[int], batch_size: int) -> TimedRounds:
    """The rounds that a full batch shared, but the first of each sequence, whose call also reads
    the prompt; where batches were never full, all but the first."""
    found = [
        (facts, np.array([round.shared_by for round in output.rounds]))
        for run in runs
        for output, front in zip(run.outputs, before, strict=True)
        for facts in [rounds_of(output, front)]
    ]
    full = max(int(shared[1:].max(initial=1)) for _, shared in found)
    least = min(batch_size, full)
    kept = [(np.arange(len(shared)) > 0) & (shared >= least) for _, shared in found]
    names = TimedRounds.__dataclass_fields__
    return TimedRounds(
        **{
            name: np.concatenate(
                [getattr(facts, name)[own] for (facts, _), own in zip(found, kept, strict=True)]
            )
            for name in names
        }
    )


def rounds_of(output: Output, before: int) -> TimedRounds:
    """The rounds of one output of a fixed draft length, in order."""
    drafted = np.array([len(round.drafted) for round in output.rounds])
    emitted = np.array([len(round.emitted) for round in output.rounds])
    return TimedRounds(
        computed=drafted,
        rows=drafted + 1,
        history=before + np.cumsum(emitted) - emitted,
        draft_seconds=np.array([round.draft_seconds for round in output.rounds]),
        target_seconds=np.array([round.target_seconds for round in output.rounds]),
    )


def head_seconds(bench: Workbench, head: AcceptanceHead) -> float:
    """What a head takes to judge a token, or all slots of a block, as the policy asks it; where
    states are made for heads alone, with the time to make one."""
    hidden, logits = example(bench)
    slots = bench.settings.max_draft if bench.block else 1
    policy = HeadPolicy(head, 1.0 - 1e-9, 100)
    judging = decision_seconds(policy, hidden.expand(slots, -1), logits)
    if bench.state_kind != "drawn":
        return judging
    row, state = logits.float(), hidden[0, :-ROW_FEATURES]
    return judging + median_seconds(lambda: drawn_state(state, row, 0))


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


def timed_lengths(lengths: Sequence[int]) -> list[int]:
    """The least, the most, and up to three between them, of which each is about as many times the
    one before: what a few rows more cost differs most where rows are few. A single length is timed
    beside twice itself."""
    ordered = sorted(set(lengths))
    if len(ordered) == 1:
        ordered.append(2 * ordered[0])
    wanted = np.geomspace(ordered[0], ordered[-1], TIMED)
    return sorted({min(ordered, key=lambda length: abs(length - want)) for want in wanted})
