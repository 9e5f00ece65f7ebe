"""policy.json from the choices of `drafttrain tune`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from drafttrain.config.commands import TuneConfig
from drafttrain.config.policy import POLICY, DraftMethod, Policy, dump_policy
from drafttrain.config.runs import head_folders
from drafttrain.config.stops import STOPS
from drafttrain.evaluation.prompts import PLAIN
from drafttrain.evaluation.report import Choice, Report, write_text
from drafttrain.evaluation.tune_plan import Candidate


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
    stop, values, method = chain.decode.stop, {}, None
    if choice.best_head is not None:
        judge = candidates[choice.best_head if chain.head is None else chain.name]
        values = {"head": judge.head, "h": judge.decode.stop.h}
        values["max_draft"] = judge.decode.stop.max_draft
    varied = {*(stop.model_fields_set - {"kind", "head"}), STOPS[stop.kind].varied}
    if choice.best not in (PLAIN, chain.name):
        best = candidates[choice.best].decode
        method = DraftMethod(tree=best.tree, stop=best.stop)
        if best.cascade is not None:
            method = DraftMethod(cascade=best.cascade, bigrams=best.bigrams)
    return Policy(
        stop=stop.kind,
        sampling=sampling,
        verifier=chain.decode.verifier,
        method=method,
        speculate=choice.best != PLAIN,
        **values | {name: getattr(stop, name) for name in varied},
    )


def write_policy_file(policy: Policy, report: Report, file: Path) -> None:
    """The policy, and what it rests on."""
    assert report.search is not None
    speedup = report.run(report.search.choices[0].best).metrics["speedup"]
    facts = {
        "machine": report.environment.gpu or report.environment.cpu,
        "target": report.target.path,
        "drafter": report.search.drafter,
        "measured_on": f"{report.data.prompts} prompts of {report.data.path}",
        "speedup": {"value": speedup.value, "low": speedup.low, "high": speedup.high},
    }
    content = json.dumps(dump_policy(policy) | facts, indent=2, ensure_ascii=False)
    write_text(file, content + "\n")


def default_policy_file(settings: TuneConfig) -> Path:
    """Beside the heads; without heads in the drafter's folder, or beside the report where the
    drafter is no folder of this machine."""
    if settings.heads is not None:
        return head_folders(Path(str(settings.heads)))[0].parent / POLICY
    folder = Path(str(settings.drafter))
    return (folder if folder.is_dir() else settings.report.parent) / POLICY
