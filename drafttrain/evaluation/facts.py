"""What a report says of target, data and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from drafttrain.evaluation.options import EvaluationOptions
from drafttrain.evaluation.prompts import PromptSet, Skipped, references_of
from drafttrain.evaluation.report import DataFacts, SkippedRow, TargetFacts
from drafttrain.models.layout import count_parameters
from drafttrain.models.loading import LoadedTarget


def target_facts(target: LoadedTarget) -> TargetFacts:
    return TargetFacts(
        path=target.path,
        parameters=count_parameters(target.model),
        dtype=str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
    )


def data_facts(
    name: str, references: Sequence[str | None], skipped: Sequence[Skipped]
) -> DataFacts:
    """references: of every prompt, None where there is none."""
    return DataFacts(
        path=name,
        prompts=len(references),
        references=sum(reference is not None for reference in references),
        skipped=[SkippedRow(row=row.row, reason=row.reason) for row in skipped],
    )


def prompts_facts(prompts: PromptSet) -> DataFacts:
    return data_facts(prompts.path, references_of(prompts.prompts), prompts.skipped)


def options_facts(options: EvaluationOptions) -> dict[str, Any]:
    facts = asdict(options)
    del facts["sampling"], facts["compared_by"]  # the report has fields for them
    return facts | {"baselines": list(options.baselines)}


def sampling_facts(options: EvaluationOptions) -> dict[str, float]:
    return asdict(options.sampling)
