"""How much better others are than the first drafter: differences paired by input."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.build.method import Method
from drafttrain.evaluation.bootstrap import Array, Ratio, estimate_difference
from drafttrain.evaluation.metrics import Counts, mean_acceptance_length, walltime_improvement
from drafttrain.evaluation.report import Run


def compare_with_first(
    runs: Sequence[Run],
    methods: Sequence[Method | None],
    counts: Sequence[Counts],
    resamples: Array,
) -> list[Run]:
    """The runs, those of `others` with their differences to the drafter that was measured first.

    `mean_acceptance_length_difference` and `mbsu_difference` are to its run at the same settings
    (k, ...), or to its first one where it has none such. methods: None for a baseline.
    """
    drafting = [place for place, run in enumerate(runs) if run.kind == "method"]
    own = [place for place in drafting if runs[place].other == runs[drafting[0]].other]
    found = list(runs)
    for place in drafting:
        if place in own:
            continue
        same = [first for first in own if runs[first].settings == runs[place].settings]
        first = (same or own)[0]
        ours, theirs = (_ratios(methods[one], counts[one]) for one in (place, first))
        differences = {
            f"{name}_difference": estimate_difference(ours[name], theirs[name], resamples)
            for name in ours.keys() & theirs.keys()
        }
        metrics = runs[place].metrics | {
            name: one for name, one in sorted(differences.items()) if one is not None
        }
        update = {"compared_with": runs[first].name, "metrics": metrics}
        found[place] = runs[place].model_copy(update=update)
    return found


def _ratios(method: Method, counts: Counts) -> dict[str, Ratio]:
    """What differences are of, by its name in reports."""
    found = {"mean_acceptance_length": mean_acceptance_length(counts)}
    if method.parameter_ratios:
        found["mbsu"] = walltime_improvement(counts, method.parameter_ratios)
    return found
