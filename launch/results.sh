#!/usr/bin/env bash
# Measure every table of docs/results.md that embedded data and models suffice for, then write it.
# Run by `make results`, after the quickstarts. A report that is there is kept: delete it to measure
# again. Close other programs first.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/step.sh

export OMP_NUM_THREADS=1
for settings in benchmarks/results/{quickstart,batches,heads,cascades,verification,trees,drawn-trees}.yaml; do
  report="${settings%.yaml}.json"
  [ -f "$report" ] || step "$report" drafttrain eval --config "$settings"
done
step "docs/results.md" python -m benchmarks.results
