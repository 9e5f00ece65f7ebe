"""What `drafttrain tune` writes of its search: findings, page, panels, policy.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from drafttrain.config.commands import TuneConfig
from drafttrain.config.policy import POLICY, DraftMethod, Policy, dump_policy
from drafttrain.config.runs import head_folders
from drafttrain.config.stops import STOPS
from drafttrain.evaluation.bootstrap import Estimate
from drafttrain.evaluation.page import (
    Card,
    Column,
    Page,
    PageTable,
    metric_cells,
    new_table,
    plain_cell,
)
from drafttrain.evaluation.prompts import PLAIN
from drafttrain.evaluation.report import Choice, Report, Search, write_text
from drafttrain.evaluation.tables import machine_note, main_columns
from drafttrain.evaluation.tune_plan import Candidate

SPEED = Column("tokens_per_second", "tokens/s", digits=0)
CALIBRATION = (
    Column("binary_kl", "KL", digits=3),
    Column("ece", "ECE", digits=3),
    Column("auc", "AUC", digits=3),
    Column("label_mean", "acceptance", digits=3),
    Column("predicted_mean", "predicted", digits=3),
)


def verdict_lines(report: Report) -> list[str]:
    """What was chosen and what it is worth on the final prompts, a sentence each."""
    search = report.search
    lines = []
    for choice in search.choices:
        best, size = result_of(report, choice.best, choice.batch_size), choice.batch_size
        words = f"batch size {size}: {choice.best}"
        if choice.best == PLAIN:
            lines.append(f"{words}; no draft is faster than plain decoding")
            continue
        lines.append(f"{words}, {_times(best['speedup'])} plain decoding")
        for name in dict.fromkeys((choice.best_fixed, choice.best_head)):
            if name not in (None, choice.best):
                other = result_of(report, name, size)
                lines.append(f"  {name}: {_times(other['speedup'])}")
    lines += settings_lines(report)
    tried = ", ".join(f"{rung.prompts}" for rung in search.rungs)
    lines.append(
        f"{1 + len(search.candidates)} candidates, compared after {tried} prompts of "
        f"{search.data.path}; the figures are of {report.data.prompts} other prompts; "
        f"{search.minutes:.1f} minutes"
    )
    lines.append(
        f"a draft token takes {1000 * search.t_draft:.2f} ms, a target call "
        f"{1000 * search.t_target:.2f} ms"
        + (f"; h by Theorem 3.1: {search.threshold:.3f}" if search.threshold else "")
    )
    if search.oracle is not None:
        oracle = search.oracle
        lines.append(
            f"the oracle (SpecDec++ Lemma 2.1) discards nothing and makes "
            f"{oracle.target_calls / oracle.tokens:.2f} target calls per token"
        )
    return lines


def settings_lines(report: Report) -> list[str]:
    """Draft lengths for serving engines, which draft chains of fixed length, 0 where plain decoding
    is faster on the final prompts; none for drafters that engines cannot load."""
    lengths = []
    for choice in report.search.choices:
        run = report.run(str(choice.best_fixed))
        speedup = result_of(report, run.name, choice.batch_size)["speedup"].value
        if run.drafter == "causal":
            k = int(run.settings["k"]) if speedup > 1.0 else 0
            lengths.append(f"{k} at batch size {choice.batch_size}")
    shown = ", ".join(lengths)
    return [f"vLLM num_speculative_tokens, llama.cpp --spec-draft-n-max: {shown}"] if shown else []


def head_table(report: Report) -> Table | None:
    """Calibration of every head on held-out draft tokens; None without heads."""
    heads = report.search.heads
    if not heads:
        return None
    table = new_table("Acceptance heads on held-out draft tokens")
    table.add_column("head", no_wrap=True)
    for column in CALIBRATION:
        table.add_column(column.heading, justify="right")
    for head in heads:
        table.add_row(head.name, *metric_cells(head, CALIBRATION, True))
    return table


def tune_page(report: Report, plot: bytes) -> Page:
    """The page: the choice at each batch size, the final figures, the plot, all candidates."""
    search = report.search
    columns = main_columns(report)
    final = PageTable(
        f"Final figures on {report.data.prompts} prompts of {report.data.path}",
        ["method", *(column.title for column in columns)],
        [[run.name, *(plain_cell(run, column, True) for column in columns)] for run in report.runs],
        search.choices[0].best,
    )
    tables = [final, *(_standings(search, choice) for choice in search.choices)]
    if search.heads:
        rows = [[h.name, *(plain_cell(h, one, True) for one in CALIBRATION)] for h in search.heads]
        titles = ["head", *(column.title for column in CALIBRATION)]
        tables.append(PageTable("Acceptance heads on held-out draft tokens", titles, rows))
    return Page(
        title=f"{report.target.path} with {search.drafter}",
        subtitle=f"Candidates decoded on {search.data.path}; {machine_note(report, True)}",
        tables=tables,
        plot=plot,
        plot_text="Speed of the candidates, discarded tokens against target calls per token",
        cards=[_card(report, choice) for choice in search.choices],
        verdicts=verdict_lines(report),
        notes=[
            "A rung decodes new prompts with the candidates left, interleaved; then the slower "
            "half leaves. Speed against the fastest is paired by prompt."
        ],
    )


def _card(report: Report, choice: Choice) -> Card:
    best = result_of(report, choice.best, choice.batch_size)
    speed = best["tokens_per_second"].value
    detail = f"{speed:,.0f} tokens/s, {_times(best['speedup'])} plain decoding"
    return Card(f"batch size {choice.batch_size}", choice.best, detail)


def _standings(search: Search, choice: Choice) -> PageTable:
    size = choice.batch_size
    prompts: dict[str, int] = {}
    for rung in search.rungs:
        if rung.batch_size == size:
            prompts |= dict.fromkeys(rung.candidates, rung.prompts)
    rows = []
    for name, one in search.standings(size).items():
        against = one.against_best
        ratio = f"{against.value:.3f} ({against.low:.3f}–{against.high:.3f})"
        rates = [f"{one.verification_rate:.3f}", f"{one.discard_rate:.3f}"]
        speed = f"{one.tokens_per_second.value:,.0f}"
        rows.append([name, str(prompts[name]), speed, ratio, *rates])
    titles = ["candidate", "prompts", SPEED.title, "against the fastest"]
    titles += ["target calls per token", "discarded per token"]
    return PageTable(f"Candidates at batch size {size}", titles, rows, choice.best)


def result_of(report: Report, name: str, batch_size: int) -> dict[str, Estimate]:
    """Metrics of a run at a batch size."""
    run = report.run(name)
    found = {one.batch_size: one.metrics for one in run.batches}
    return found.get(batch_size, run.metrics)


def _times(estimate: Estimate) -> str:
    return f"{estimate.value:.2f}× ({estimate.low:.2f}–{estimate.high:.2f})"


def make_policy(
    choices: list[Choice], candidates: Mapping[str, Candidate], sampling: dict[str, float]
) -> Policy:
    """The policy of the smallest batch size, with those of the others in it."""
    first, *larger = (policy_of(one, candidates, sampling) for one in choices)
    batches = {one.batch_size: own for one, own in zip(choices[1:], larger, strict=True)}
    return first.model_copy(update={"batches": batches})


def policy_of(
    choice: Choice, candidates: Mapping[str, Candidate], sampling: dict[str, float]
) -> Policy:
    """The best chain, with the best head and its h even where it does not stop by it; the tree or
    cascade that is faster, if one is; whether plain decoding is faster than all."""
    chain = candidates[str(choice.best_chain)]
    best = None if choice.best in (PLAIN, chain.name) else candidates[choice.best]
    stop, values = chain.decode.stop, {}
    if choice.best_head is not None:
        judge = candidates[choice.best_head if chain.head is None else chain.name]
        values = {"head": judge.head, "h": judge.decode.stop.h}
        values["max_draft"] = judge.decode.stop.max_draft
    varied = {name: getattr(stop, name) for name in stop.model_fields_set - {"kind", "head"}}
    return Policy(
        stop=stop.kind,
        sampling=sampling,
        verifier=chain.decode.verifier,
        method=None if best is None else method_of(best),
        speculate=choice.best != PLAIN,
        **(values | varied | {STOPS[stop.kind].varied: getattr(stop, STOPS[stop.kind].varied)}),
    )


def method_of(best: Candidate) -> DraftMethod:
    """The tree or cascade that drafts, as policy.json has it."""
    decode = best.decode
    if decode.cascade is not None:
        return DraftMethod(cascade=decode.cascade, bigrams=decode.bigrams)
    return DraftMethod(tree=decode.tree, stop=decode.stop)


def write_policy_file(policy: Policy, report: Report, file: Path) -> None:
    """The policy, and what it rests on."""
    assert report.search is not None
    facts: dict[str, Any] = {
        "machine": report.environment.gpu or report.environment.cpu,
        "target": report.target.path,
        "drafter": report.search.drafter,
        "measured_on": f"{report.data.prompts} prompts of {report.data.path}",
    }
    chosen = report.search.choices[0].best
    speedup = report.run(chosen).metrics["speedup"]
    facts["speedup"] = {"value": speedup.value, "low": speedup.low, "high": speedup.high}
    content = json.dumps(dump_policy(policy) | facts, indent=2, ensure_ascii=False)
    write_text(file, content + "\n")


def default_policy_file(settings: TuneConfig) -> Path:
    """Beside the heads; without heads in the drafter's folder, or beside the report where the
    drafter is no folder of this machine."""
    if settings.heads is not None:
        return head_folders(Path(str(settings.heads)))[0].parent / POLICY
    folder = Path(str(settings.drafter))
    return (folder if folder.is_dir() else settings.report.parent) / POLICY
