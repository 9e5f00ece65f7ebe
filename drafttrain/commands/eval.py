"""`drafttrain eval`: measures a drafter and writes report.json, samples, a plot and a page.

Settings -> `make_plan` (checks methods and inputs) -> load models, build methods -> `evaluate`
(decodes, counts, reports) -> files and the printed table.
"""

from collections.abc import Sequence

from drafttrain.build.pairs import load_pair
from drafttrain.config.commands import EvalConfig
from drafttrain.config.decode import DecodeConfig
from drafttrain.config.sweep import expand_sweep
from drafttrain.decoding.engine.engine import compile_calls
from drafttrain.evaluation.evaluate import evaluate, write_evaluation
from drafttrain.evaluation.plan import build_methods, make_plan
from drafttrain.evaluation.tables import main_table, parity_lines, print_findings
from drafttrain.models.loading import report_generate_defaults


def measure(
    settings: EvalConfig, dry_run: bool = False, variants: Sequence[DecodeConfig] | None = None
) -> None:
    """Runs an evaluation, writes its files and prints its table.

    dry_run: prints the plan, without reading weights. variants: methods instead of the sweep's.
    Raises ValueError, before any model loads, for settings that do not fit each other.
    """
    plan = make_plan(settings, variants or expand_sweep(settings.decode, settings.sweep))
    if dry_run:
        print("\n".join(plan.lines()))
        return
    pair = load_pair(settings.target, *plan.drafters)
    report_generate_defaults(pair.target, settings.decode.sampling.temperature)
    methods = build_methods(plan, pair)
    compile_calls(settings.compile)
    evaluation = evaluate(pair, methods, plan.rows, settings, progress=True)
    file, report = write_evaluation(evaluation, settings.report), evaluation.report
    files = [f"report: {file}", f"page: {file.with_suffix('.html')}"]
    print_findings([main_table(report)], parity_lines(report), files)
