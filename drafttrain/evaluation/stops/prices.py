"""What everything that a stop policy spends costs on this machine, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from drafttrain.decoding.stopping import Entropy, HeadPolicy
from drafttrain.evaluation.metrics import mean_target_seconds
from drafttrain.evaluation.options import timing_options
from drafttrain.evaluation.runner import Decoded, decode_interleaved
from drafttrain.evaluation.stops.costs import (
    Costs,
    decision_seconds,
    fit_costs,
    median_seconds,
    threshold_from_costs,
)
from drafttrain.evaluation.stops.replay import Candidate
from drafttrain.evaluation.stops.report import CostFacts
from drafttrain.evaluation.stops.workbench import Workbench
from drafttrain.models.acceptance_head import AcceptanceHead
from drafttrain.models.draft_states import ROW_FEATURES, drawn_states


@dataclass(frozen=True)
class Prices:
    """Seconds of everything that a policy spends."""

    costs: Costs
    plain_tokens_per_second: float
    heads: dict[str, float] = field(default_factory=dict)
    """What each head takes to judge a token."""
    entropy: float = 0.0

    def judging(self, candidate: Candidate) -> float:
        """Seconds that the policy itself takes for a token."""
        if candidate.head is not None:
            return self.heads[candidate.head]
        return self.entropy if candidate.kind == "entropy" else 0.0


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
    return prices, cost_facts(costs, prices, plain, lengths, len(prompts))


def cost_facts(
    costs: Costs, prices: Prices, plain: Decoded, lengths: list[int], prompts: int
) -> CostFacts:
    return CostFacts(
        **asdict(costs),
        plain_target=mean_target_seconds(plain.outputs),
        plain_tokens_per_second=prices.plain_tokens_per_second,
        lengths=lengths,
        prompts=prompts,
        entropy_seconds=prices.entropy,
        suggested_h=threshold_from_costs(costs.t_draft, costs.t_target)
        if costs.t_target > costs.t_draft
        else None,
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
    rows, token = logits[None].float(), torch.zeros(1, dtype=torch.long)
    return judging + median_seconds(lambda: drawn_states(hidden[:, :-ROW_FEATURES], rows, token))


def example(bench: Workbench) -> tuple[torch.Tensor, torch.Tensor]:
    """A hidden state and a row of logits of the drafter's sizes, for timing. [1, D], [V]."""
    model = bench.pair.drafter_model
    assert model is not None
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
