"""Tables and sentences of a tuning report, for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.played.costs import MethodCosts
from drafttrain.evaluation.stops.replay import OF_ROWS
from drafttrain.evaluation.stops.report import PolicyResult, Replayed, TuneReport
from drafttrain.evaluation.stops.round_costs import RoundCosts
from drafttrain.evaluation.table_style import (
    Column,
    FittedTable,
    add_metrics,
    metric_cells,
    new_table,
)

COLUMNS = (
    Column("discard_rate", "discarded %", digits=1, percent=True),
    Column("verification_rate", "target calls %", digits=1, percent=True),
    Column("mean_acceptance_length", "mean acceptance length"),
    Column("tokens_per_second", "tok/s modelled", digits=0),
    Column("gain", "gain %", digits=1, percent=True),
    Column("oracle_share", "of oracle's gain %", digits=0, percent=True),
    Column("regret", "regret %", digits=1, percent=True),
)
MOST_HEADS = 3
"""Head policies in the main table; the heads' own table has them all."""
MOST_PLAYED = 2
"""Trees and cascades in it."""
CLOSE = 0.99
"""Share of the best head's throughput from which on a figure is set in bold (Appendix C.3)."""


def policy_table(report: TuneReport) -> FittedTable:
    """Fixed lengths, the best of the other policies, and the oracle, on the reporting prompts."""
    return FittedTable(lambda intervals: _policy_table(report, intervals))


def head_table(report: TuneReport) -> Table:
    """w_rej and D against KL, calibration, best h and throughput (SpecDec++ Table 3).

    h is the best of each head on the choosing prompts; both figures of tokens a second are at it.
    """
    table = new_table("Heads")
    table.caption = (
        f"KL, ECE and AUC on {report.calibration_prompts} prompts, drafts of "
        f"{report.calibration_length}: all positions / no earlier rejection. Bold: at least "
        f"{CLOSE:.0%} of the best."
    )
    titles = ["w_rej", "D", "KL", "ECE", "AUC", "h", "tok/s chosen on"]
    splits = [report.chosen_on]
    if report.reported_on is not None:
        titles.append("tok/s reported on")
        splits.append(report.reported_on)
    for title in titles:
        table.add_column(title, justify="right")
    facts = sorted(report.head_facts, key=lambda head: (head.rejection_weight, head.depth))
    at_best_h = {head.name: best_policy(report.chosen_on, head.name) for head in facts}
    tops = [max(_speed(split.find(p.name)) for p in at_best_h.values()) for split in splits]
    for head in facts:
        chosen = at_best_h[head.name]
        knowledge = [
            _pair(head.all_positions, head.before_rejection, metric, digits)
            for metric, digits in (("binary_kl", 3), ("ece", 3), ("auc", 2))
        ]
        speeds = [
            _marked(_speed(split.find(chosen.name)), top)
            for split, top in zip(splits, tops, strict=True)
        ]
        weight, depth = f"{head.rejection_weight:g}", str(head.depth)
        table.add_row(weight, depth, *knowledge, f"{chosen.value:g}", *speeds)
    return table


def cost_lines(report: TuneReport) -> list[str]:
    """t_draft and t_target with their fit (SpecDec++ Table 2), and what a head costs."""
    costs = report.costs
    fit = "by the rounds' own clocks, as a fit gave less than nothing,"
    if costs.r_squared is not None:
        fit = f"R² {costs.r_squared:.3f}"
    lines = [
        f"t_draft {_ms(costs.t_draft)}, t_target {_ms(costs.t_target)} "
        f"({costs.t_target / costs.t_draft:.1f} times), {fit} over "
        f"{costs.runs} decoding runs; plain decoding {_ms(costs.plain_target)} a token",
    ]
    if costs.draft_mean is not None and costs.target_mean is not None:
        lines.append(
            f"direct means: a drafter pass {_ms(costs.draft_mean)}, a target call "
            f"{_ms(costs.target_mean)}"
        )
    lines += [_round_line(one) for one in costs.rounds]
    lines += [_method_line(one) for one in costs.methods]
    lines += [
        f"{name} verification: {_ms(seconds)} more than rejection a round of {costs.lengths[-1]}"
        for name, seconds in costs.rules.items()
    ]
    if costs.suggested_h is not None:
        lines.append(f"Theorem 3.1 suggests h = {costs.suggested_h:.2f} to start with")
    if report.head_facts:
        slowest = max(report.head_facts, key=lambda head: head.seconds)
        lines.append(
            f"a head takes up to {_ms(slowest.seconds)} a token ({slowest.name}); it is counted"
        )
    return lines


def verdict_lines(report: TuneReport) -> list[str]:
    """Which policy wins, by how much, and where a fixed length is as good."""
    replayed = report.reported
    where = f"{replayed.data.prompts} prompts of {replayed.data.path}"
    if report.reported_on is None:
        where += ", on which it was also chosen (give --report-data for an unbiased figure)"
    lines = [f"best: {report.best}, chosen on {report.chosen_on.data.prompts} prompts"]
    if report.best_chain not in (None, report.best):
        lines.append(f"programs that draft chains alone take {report.best_chain} from policy.json")
    names = [report.best, report.best_head]
    lines += [
        _against_fixed(report, name, where)
        for name in dict.fromkeys(names)
        if name not in (None, report.best_fixed)
    ]
    lines += _why_fixed(report) + rung_lines(report)
    return lines + batch_lines(report) + checked_lines(report)


def rung_lines(report: TuneReport) -> list[str]:
    """How many trees and cascades saw how many prompts."""
    if not report.rungs:
        return []
    seen = ", ".join(f"{one.candidates} on {one.prompts}" for one in report.rungs)
    return [f"trees and cascades played, by prompts: {seen}"]


def batch_lines(report: TuneReport) -> list[str]:
    """The best policy at every batch size, where there are several; where drafting does not pay."""
    slower = [
        f"batch {one.batch_size}: drafting does not pay, plain decoding makes "
        f"{one.plain_tokens_per_second:.0f} tokens/s"
        for one in report.batches
        if one.tokens_per_second.value < one.plain_tokens_per_second
    ]
    if len(report.batches) < 2:
        return slower
    chosen = [
        f"batch {one.batch_size}: {one.best}, {one.tokens_per_second.value:.0f} tokens/s predicted "
        f"(plain {one.plain_tokens_per_second:.0f}), {_percent(one.gain)} over {one.best_fixed}, "
        f"regret {100 * one.regret.value:.1f} % to the oracle"
        for one in report.batches
    ]
    return chosen + slower


def checked_lines(report: TuneReport) -> list[str]:
    """What was predicted of the best few, against the clock."""
    if not report.checked:
        return []
    lines = [
        f"decoded, batch {one.batch_size}: {one.name} {one.decoded:.0f} tokens/s, "
        f"{one.decoded_speedup:.2f}× plain, predicted {one.predicted_speedup:.2f}× "
        f"({_signed(one.error)} %)"
        for one in report.checked
    ]
    median = statistics.median(abs(one.error) for one in report.checked)
    off = f"of the rounds decoded, predictions are off by {100 * median:.1f} % in the median"
    return [*lines, off]


def _against_fixed(report: TuneReport, name: str, where: str) -> str:
    policy = report.reported.find(name)
    gain = policy.metrics["gain"]
    line = f"{name}: {_percent(gain)} over {report.best_fixed} on {where}"
    share = policy.metrics.get("oracle_share")
    if gain.low > 0.0 and share is not None:
        line += f"; {share.value:.0%} of the oracle's gain"
    elif gain.high < 0.0:
        line += f"; {report.best_fixed} is better there"
    elif gain.low <= 0.0:
        line += f"; {report.best_fixed} is as good there: the interval holds 0"
    return line


def best_policy(replayed: Replayed, head: str) -> PolicyResult:
    """A head at its best h."""
    own = [policy for policy in replayed.policies if policy.head == head]
    return max(own, key=_speed)


def _why_fixed(report: TuneReport) -> list[str]:
    """What the room for any policy is, where a fixed length wins."""
    if report.best != report.best_fixed:
        return []
    oracle = report.reported.find("oracle")
    return [
        f"a fixed length wins: the oracle itself would gain {_percent(oracle.metrics['gain'])} "
        f"with t_target/t_draft = {report.costs.t_target / report.costs.t_draft:.1f}; a slower "
        "target or a better drafter leaves more to gain"
    ]


def _policy_table(report: TuneReport, intervals: bool) -> Table:
    replayed = report.reported
    table = new_table(
        f"{report.target.path} with {report.drafter} on {replayed.data.path}, "
        f"{replayed.data.prompts} inputs"
    )
    table.caption = (
        f"Replayed; {replayed.replicates} tosses of the coins an output. Gain over "
        f"{report.best_fixed}, the best fixed length on the choosing prompts."
    )
    table.add_column("policy", no_wrap=True)
    add_metrics(table, COLUMNS)
    for policy in main_policies(report):
        name = Text(policy.name, style="bold" if policy.name == report.best else "")
        table.add_row(name, *metric_cells(policy, COLUMNS, intervals))
    return table


def main_policies(report: TuneReport) -> list[PolicyResult]:
    """Fixed lengths under the best one's rule; the head that was chosen and the best others, trees
    and cascades, and of each other kind and rule the best, by the choosing prompts; the oracle of
    chains."""

    def best(kind: str, count: int) -> list[str]:
        own = [policy for policy in report.chosen_on.policies if policy.kind == kind]
        return [policy.name for policy in sorted(own, key=_speed, reverse=True)[:count]]

    rule = report.chosen_on.find(report.best_fixed).verifier
    fixed = [p.name for p in report.chosen_on.under(rule) if p.kind == "fixed"]
    by_rows = [name for kind in OF_ROWS for name in best(kind, 1)]
    played = [name for kind in ("tree", "cascade") for name in best(kind, MOST_PLAYED)]
    chosen = [] if report.best_head is None else [report.best_head]
    heads = list(dict.fromkeys([*chosen, *best("head", MOST_HEADS)]))[:MOST_HEADS]
    names = dict.fromkeys([*fixed, *by_rows, *heads, *played])
    names = [*names, *_of_other_rules(report, names), "oracle"]
    return [report.reported.find(name) for name in names]


def _of_other_rules(report: TuneReport, names: Iterable[str]) -> list[str]:
    """The best policy of every rule that none of the named ones is under."""
    shown = {report.chosen_on.find(name).verifier for name in names}
    others = dict.fromkeys(p.verifier for p in report.chosen_on.policies if p.kind != "oracle")
    return [
        max((p for p in report.chosen_on.under(rule) if p.kind != "oracle"), key=_speed).name
        for rule in others
        if rule not in shown
    ]


def _speed(policy: PolicyResult) -> float:
    return policy.metrics["tokens_per_second"].value


def _marked(speed: float, top: float) -> Text:
    return Text(f"{speed:.0f}", style="bold" if speed >= CLOSE * top else "")


def _pair(
    everywhere: dict[str, Estimate], before: dict[str, Estimate], metric: str, digits: int
) -> str:
    values: Sequence[Estimate | None] = (everywhere.get(metric), before.get(metric))
    return " / ".join("–" if one is None else f"{one.value:.{digits}f}" for one in values)


def _round_line(costs: RoundCosts) -> str:
    """What drafting and judging take, at the ends of what was measured."""
    shown = []
    for name, curve in (("drafting", costs.draft), ("judging", costs.target)):
        counts = [max(1.0, curve.knots[0]), curve.knots[-1] + 1.0]
        shown.append(f"{name} " + ", ".join(f"{n:g}: {_ms(float(curve.at(n)))}" for n in counts))
    return (
        f"a round at batch {costs.batch_size}, by tokens drafted and rows judged: "
        f"{'; '.join(shown)}; timed sequences are predicted to {100 * costs.error:.1f} % "
        "in the median"
    )


def _method_line(costs: MethodCosts) -> str:
    """What a tree or a cascade takes, by what counts."""
    shown = {name: seconds for name, seconds in costs.drafting.items() if seconds > 0.0}
    drafting = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in shown.items())
    rows = costs.target.knots[-1] + 1.0
    return (
        f"{costs.way} at batch {costs.batch_size}: drafting, each of its {drafting}; judging "
        f"{rows:g} rows {_ms(float(costs.target.at(rows)))}; timed sequences are predicted to "
        f"{100 * costs.error:.1f} % in the median"
    )


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}".replace("-", "−")


def _percent(estimate: Estimate) -> str:
    low, value, high = map(_signed, (estimate.low, estimate.value, estimate.high))
    return f"{value} % ({low} to {high})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
