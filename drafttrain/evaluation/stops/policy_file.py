"""policy.json of a tuning: the best chain's policy, what is faster than it, what both rest on."""

from __future__ import annotations

import json
from pathlib import Path

from drafttrain.build.policy import POLICY, dump_policy
from drafttrain.build.verifiers import AUTO
from drafttrain.config.commands import TuneConfig
from drafttrain.config.decode import VerifierConfig
from drafttrain.config.policy import DraftMethod, Policy
from drafttrain.config.runs import head_folders
from drafttrain.config.stops import STOPS
from drafttrain.evaluation.played.candidates import Played
from drafttrain.evaluation.report import write_text
from drafttrain.evaluation.stops.choice import Choice
from drafttrain.evaluation.stops.replay import Candidate
from drafttrain.evaluation.stops.report import BatchChoice, TuneReport


def write_policy_file(report: TuneReport, choice: Choice, file: Path) -> None:
    """What is best at every batch size, the best head and its h, and what the choice rests on."""
    first, *larger = choice.batches
    policy = chosen_policy(report, choice, first)
    batches = {one.batch_size: chosen_policy(report, choice, one) for one in larger}
    policy, best = policy.model_copy(update={"batches": batches}), choice.best
    gain = report.reported.find(best.name).metrics["gain"]
    facts = {
        "gain_over_best_fixed": {
            "best_fixed": report.best_fixed,
            "value": gain.value,
            "low": gain.low,
            "high": gain.high,
            "data": report.reported.data.path,
            "chosen_on_the_same_data": report.reported_on is None,
        },
        "costs": report.costs.model_dump(include={"t_draft", "t_target", "r_squared"}),
        "machine": report.environment.gpu or report.environment.cpu,
        "target": report.target.path,
        "drafter": report.drafter,
    }
    content = dump_policy(policy) | facts
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def chosen_policy(report: TuneReport, choice: Choice, chosen: BatchChoice) -> Policy:
    """The policy of the best chain, with the best head and its h even where it does not stop by it;
    beside it the tree or cascade that is faster, if one is."""
    by_name = {candidate.name: candidate for candidate in choice.candidates}
    best, chain = by_name[chosen.best], by_name[chosen.best_chain]
    assert isinstance(chain, Candidate)
    head = choice.head if chain.head is None else chain
    value = int(chain.value) if chain.kind == "fixed" else chain.value
    values = {} if head is None else {"head": head.head, "h": head.value}
    return Policy(
        stop=chain.kind,
        max_draft=report.max_draft,
        sampling=report.sampling,
        verifier=AUTO if chain.verifier == "rejection" else VerifierConfig(kind=chain.verifier),
        method=method_of(best) if isinstance(best, Played) else None,
        **(values | {STOPS[chain.kind].varied: value}),
    )


def method_of(best: Played) -> DraftMethod:
    """What drafts, as policy.json has it."""
    decode, cascade = best.decode, best.decode.cascade
    if cascade is not None:
        return DraftMethod(cascade=cascade, bigrams=decode.bigrams)
    return DraftMethod(tree=decode.tree, stop=decode.stop)


def default_policy_file(settings: TuneConfig) -> Path:
    """Beside the heads; without heads in the drafter's folder, or beside the report where that is
    none of this machine."""
    if settings.heads is not None:
        return head_folders(Path(str(settings.heads)))[0].parent / POLICY
    folder = Path(str(settings.drafter))
    return (folder if folder.is_dir() else settings.report.parent) / POLICY
