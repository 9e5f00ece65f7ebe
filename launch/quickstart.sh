#!/usr/bin/env bash
# Distil the embedded target, train a drafter for it, decode one sentence, measure both.
# Run by `make quickstart`. Running it again continues: what is finished is not done twice.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/step.sh

run=checkpoints/quickstart
test=data/docstrings/test.jsonl.gz
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}"

step "1/3 Distil the target, train a drafter on its outputs" \
  drafttrain train recipes/quickstart.yaml
export OMP_NUM_THREADS=1 # a model of this size decodes fastest with one
step "2/3 One sentence, round by round" \
  drafttrain generate --drafter "$run" --data "$test" --limit 1 --show-rounds
step "3/3 Measure it on sentences it has never seen" \
  drafttrain eval --drafter "$run" --data "$test" repeats=1 "baselines=[generate]" \
  --report "$run/report.json"
printf '\nDone in %d s: %s, samples.jsonl and report.png\n' "$SECONDS" "$run/report.json"
