"""What a drafted token and a target call cost on this machine, and what policies cost with it.

SpecDec++ Eq. 2.1: T = t_draft N_draft + t_target N_target, fitted by least squares over decoding
runs (its Table 2), here with a constant a prompt for the encoder or the prompt's own pass. Where a
drafter makes one token a pass, N_draft counts passes and drafted tokens alike. A block drafter
makes one pass a round: t_target is then the cost of a round, its pass included, and t_draft that of
a drafted token more. A token more to verify is part of t_draft either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter

import numpy as np
import torch

from drafttrain.decoding.roles import StopPolicy
from drafttrain.decoding.stopping import Entropy, HeadPolicy
from drafttrain.decoding.types import DraftState, Output
from drafttrain.evaluation.bootstrap import Array
from drafttrain.evaluation.metrics import count_rounds, mean_target_seconds
from drafttrain.evaluation.options import timing_options
from drafttrain.evaluation.runner import decode_interleaved
from drafttrain.evaluation.stops.replay import OF_ROWS, Candidate
from drafttrain.evaluation.stops.report import CostFacts
from drafttrain.evaluation.stops.workbench import Workbench
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import ROW_FEATURES, drawn_states


@dataclass(frozen=True)
class Costs:
    """Seconds, fitted and by direct means."""

    t_draft: float
    """A drafted token."""
    t_target: float
    """A target call (with its drafter pass, where one pass drafts a block)."""
    constant: float
    """A prompt, before its first round."""
    r_squared: float
    """Share of the variance of the prompts' seconds that the fit explains."""
    runs: int
    """Decoding runs fitted: prompts times methods."""
    t_slot: float = 0.0
    """A slot of a block that is computed but not submitted."""
    draft_mean: float | None = None
    """Mean seconds of drafting over drafter passes, from the rounds' own clocks."""
    target_mean: float | None = None
    """Mean seconds of scoring and verifying over target calls."""

    def seconds(self, drafted: Array, calls: Array, computed: Array | None = None) -> Array:
        """Eq. 2.1, without the constant; computed counts slots behind the stop too."""
        spare = 0.0 if computed is None else self.t_slot * (computed - drafted)
        return self.t_draft * drafted + self.t_target * calls + spare


def fit_costs(outputs: Sequence[Output], block: bool = False, constant: bool = True) -> Costs:
    """t_draft and t_target from decoded outputs with their seconds and rounds.

    block: whether one pass drafts a block; then what a slot costs is fitted to the rounds' own
    clocks. Raises ValueError where the runs do not tell the two apart, or costs come out below 0.
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
    if t_draft <= 0 or t_target <= 0:
        raise ValueError(
            f"the timed runs give t_draft = {t_draft:.2e} s and t_target = {t_target:.2e} s, which "
            "cannot be; time more prompts (timing_prompts), with nothing else running"
        )
    residual = seconds - facts @ solution
    spread = ((seconds - seconds.mean()) ** 2).sum()
    passes = float(counts.passes.sum())
    return Costs(
        t_draft=t_draft,
        t_target=t_target,
        constant=float(solution[2]) if constant else 0.0,
        r_squared=float(1.0 - (residual**2).sum() / spread),
        runs=len(outputs),
        t_slot=_slot_seconds(outputs) if block else 0.0,
        draft_mean=float(counts.draft_seconds.sum()) / passes if passes else None,
        target_mean=mean_target_seconds(outputs),
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
class Prices:
    """Seconds of everything that a policy spends."""

    costs: Costs
    plain_tokens_per_second: float
    heads: dict[str, float] = field(default_factory=dict)
    """What each head takes to judge a token."""
    entropy: float = 0.0
    """What policies that go by rows take for one: the entropy policy's time."""

    def judging(self, candidate: Candidate) -> float:
        """Seconds that the policy itself takes for a token."""
        if candidate.head is not None:
            return self.heads[candidate.head]
        return self.entropy if candidate.kind in OF_ROWS else 0.0


def measure_costs(bench: Workbench) -> tuple[Prices, CostFacts]:
    """t_draft and t_target of this machine: some prompts decoded at some lengths, interleaved."""
    lengths = timed_lengths(bench.settings.lengths)
    prompts = bench.choosing.prompts[: bench.settings.timing_prompts]
    options = timing_options(bench.sampling)
    methods = [bench.method(k) for k in lengths]
    plain, *drafted = decode_interleaved(
        bench.pair.target, bench.target, methods, prompts, options, progress=True
    )
    outputs = [output for decoded in drafted for output in decoded.outputs]
    costs = fit_costs(outputs, bench.block)
    heads = {name: head_seconds(bench, head) for name, head in bench.heads.items()}
    entropy = decision_seconds(Entropy(1e9, 100), *example(bench))
    seconds, tokens = plain.median_seconds.sum(), sum(len(o.tokens) for o in plain.outputs)
    prices = Prices(costs, float(tokens / seconds), heads, entropy)
    slower = costs.t_target > costs.t_draft
    facts = CostFacts(
        **asdict(costs),
        plain_target=mean_target_seconds(plain.outputs),
        plain_tokens_per_second=prices.plain_tokens_per_second,
        lengths=lengths,
        prompts=len(prompts),
        entropy_seconds=entropy,
        suggested_h=threshold_from_costs(costs.t_draft, costs.t_target) if slower else None,
    )
    return prices, facts


def head_seconds(bench: Workbench, head: AcceptanceHead) -> float:
    """What a head takes to judge a token, or all slots of a block, as the policy asks it; where
    states are made for heads alone, with the time to make one."""
    hidden, logits = example(bench)
    slots = bench.settings.max_draft if bench.block else 1
    policy = HeadPolicy(head, 1.0 - 1e-9, 100)
    judging = decision_seconds(policy, hidden.expand(slots, -1), logits)
    if bench.state_kind != "drawn":
        return judging
    rows, token = logits[None].float(), torch.zeros(1, dtype=torch.long)
    return judging + median_seconds(lambda: drawn_states(hidden[:, :-ROW_FEATURES], rows, token))


def example(bench: Workbench) -> tuple[torch.Tensor, torch.Tensor]:
    """A hidden state and a row of logits of the drafter's sizes, for timing. [1, D], [V]."""
    model = bench.pair.drafter_model
    width = next(iter(bench.heads.values())).config.hidden_size
    vocabulary = bench.pair.target.model.config.get_text_config(decoder=True).vocab_size
    like = {"dtype": model.dtype, "device": model.device}
    return torch.zeros(1, width, **like), torch.zeros(vocabulary, **like)


def timed_lengths(lengths: Sequence[int]) -> list[int]:
    """The least, the middle and the most; a single length is timed beside twice itself."""
    ordered = sorted(set(lengths))
    if len(ordered) == 1:
        ordered.append(2 * ordered[0])
    return sorted({ordered[place] for place in (0, len(ordered) // 2, -1)})
