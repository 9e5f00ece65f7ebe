"""What `drafttrain tune` found, as JSON: its schema, and reading and writing it."""

from __future__ import annotations

from pathlib import Path

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.environment import Environment
from drafttrain.evaluation.played.costs import MethodCosts
from drafttrain.evaluation.played.halving import Rung
from drafttrain.evaluation.report import DataFacts, Part, TargetFacts, read_json
from drafttrain.evaluation.stops.calibration import Reliability
from drafttrain.evaluation.stops.replay import Kind
from drafttrain.evaluation.stops.round_costs import RoundCosts


class CostFacts(Part):
    """t_draft and t_target on this machine (SpecDec++ Table 2), seconds."""

    t_draft: float
    t_target: float
    constant: float
    """A prompt, before its first round."""
    t_slot: float
    """A slot of a block that is computed but not submitted."""
    r_squared: float | None
    """None: times on a busy machine could not be fitted, and t_draft and t_target are direct means.
    """
    runs: int
    draft_mean: float | None
    """Direct mean of a drafter pass; the fit's t_draft also holds verifying one token more."""
    target_mean: float | None
    """Direct mean of a target call."""
    plain_target: float
    """Seconds a token of plain decoding, which is a target call alone."""
    plain_tokens_per_second: float
    lengths: list[int]
    """Fixed lengths that were timed."""
    prompts: int
    entropy_seconds: float
    """What the entropy policy takes to judge a token."""
    rounds: list[RoundCosts] = []
    """What a round costs, as functions of its counts, at every batch size."""
    methods: list[MethodCosts] = []
    """The same of each kind of tree, and of cascades."""
    rules: dict[str, float] = {}
    """Seconds that a rule takes for a round of the longest fixed length, more than rejection."""
    suggested_h: float | None
    """Theorem 3.1 with Delta = 0: a starting point for h; None where the target is the faster."""


class BatchChoice(Part):
    """The best candidate at a batch size, on the prompts to choose on."""

    batch_size: int
    best: str
    best_chain: str | None = None
    """The best stop policy of a chain."""
    best_fixed: str
    tokens_per_second: Estimate
    """Predicted, all sequences together, of the best."""
    gain: Estimate
    """Over the best fixed length there."""
    regret: Estimate
    """Against the oracle there, which drafts chains: trees and cascades may beat it."""
    plain_tokens_per_second: float


class CheckedPolicy(Part):
    """A policy that was decoded for real, on the prompts that costs were measured on."""

    name: str
    batch_size: int
    predicted: float
    """Tokens a second by the costs, of the rounds that were decoded; the last batches of these
    prompts are not full."""
    decoded: float
    """Tokens a second by the clock."""
    plain_predicted: float = 1.0
    """The same of plain decoding."""
    plain_decoded: float = 1.0
    """The same of plain decoding, beside what was decoded: machines are not always as fast. Reports
    of earlier versions have neither."""

    @property
    def predicted_speedup(self) -> float:
        """Over plain decoding."""
        return self.predicted / self.plain_predicted

    @property
    def decoded_speedup(self) -> float:
        """Over plain decoding in the same run."""
        return self.decoded / self.plain_decoded

    @property
    def error(self) -> float:
        """Share of the speed-up that was decoded by which its prediction is off."""
        return self.predicted_speedup / self.decoded_speedup - 1.0


class HeadFacts(Part):
    """A head: how large, how long it takes, how well it knows."""

    name: str
    depth: int
    rejection_weight: float
    parameters: int
    seconds: float
    """What it takes to judge a token."""
    all_positions: dict[str, Estimate]
    """Binary KL, ECE, AUC over all drafted positions that decoding made."""
    before_rejection: dict[str, Estimate]
    """The same over those with no earlier token of the draft rejected."""
    reliability: Reliability
    """Bins of equal width over all drafted positions."""


class PolicyResult(Part):
    """One stop policy, replayed, or one tree or cascade, played."""

    name: str
    kind: Kind
    value: float
    """What the policy goes by: k, nats, h, ...; of trees and cascades their most tokens."""
    head: str | None
    verifier: str = "rejection"
    """The rule that judges its drafts, where tokens are sampled."""
    metrics: dict[str, Estimate]
    """discard_rate, verification_rate, mean_acceptance_length, acceptance_rate, tokens_per_second
    (modelled), speedup (modelled, over plain decoding), gain (over the best fixed length), regret
    and oracle_share."""
    totals: dict[str, int]


class Replayed(Part):
    """All policies under all rules, on one set of prompts."""

    data: DataFacts
    tokens: int
    """Of the outputs."""
    replicates: int
    """Tosses of the coins for each output, summed in all counts."""
    policies: list[PolicyResult]

    def find(self, name: str) -> PolicyResult:
        """The policy of that name. Raises ValueError naming those there are."""
        for policy in self.policies:
            if policy.name == name:
                return policy
        names = ", ".join(policy.name for policy in self.policies)
        raise ValueError(f"policy {name!r} was not replayed; there are {names}")

    def under(self, verifier: str) -> list[PolicyResult]:
        """The policies under one rule."""
        return [policy for policy in self.policies if policy.verifier == verifier]


class TuneReport(Part):
    """The choice, what it rests on, and what it is worth on prompts it was not chosen on."""

    target: TargetFacts
    drafter: str
    heads: str | None
    sampling: dict[str, float]
    max_new_tokens: int
    max_draft: int
    costs: CostFacts
    head_facts: list[HeadFacts]
    calibration_prompts: int
    calibration_length: int
    """Fixed length of the drafts on which heads are judged."""
    best: str
    """What makes the most modelled tokens a second on the choosing prompts."""
    best_chain: str | None = None
    """The same of chains alone; None: of a former version."""
    best_fixed: str
    best_head: str | None
    batches: list[BatchChoice] = []
    """The choice at every batch size asked for."""
    rungs: list[Rung] = []
    """Of successive halving over trees and cascades."""
    dropped: dict[str, int] = {}
    """Trees and cascades that did not see all prompts, with how many they saw."""
    checked: list[CheckedPolicy] = []
    """The best few, decoded for real."""
    chosen_on: Replayed
    reported_on: Replayed | None
    """None: no report_data; figures are then of the prompts that the choice was made on."""
    environment: Environment

    @property
    def reported(self) -> Replayed:
        return self.reported_on or self.chosen_on

    def head(self, name: str) -> HeadFacts:
        return next(head for head in self.head_facts if head.name == name)


def read_tune_report(path: Path) -> TuneReport:
    """Read a report, of former versions too. Raises ValueError for a file that is none."""
    return read_json(TuneReport, path, "drafttrain tune")
