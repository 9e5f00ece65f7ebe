#!/usr/bin/env bash
# Train acceptance heads for the embedded GSM8K pair, choose one, measure it against fixed lengths.
# Run by `make quickstart-heads`. Running it again continues: what is finished is not done twice.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/step.sh

run=checkpoints/quickstart-heads
test=data/gsm8k/test.jsonl.gz
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}"

step "1/3 Sample the target, cache the drafter's states, train the heads" \
  drafttrain train recipes/quickstart_heads.yaml
# Models so small are decoded fastest by one thread: waking a second takes longer than it saves.
export OMP_NUM_THREADS=1
step "2/3 Decode held-out prompts with every candidate, choose, report on unseen ones" \
  drafttrain tune --write --heads "$run" --report-data "$test" --minutes 3 \
  "sweep={k: [3, 4], h: [0.3, 0.5], cumulative: [0.2], confidence: [], entropy: []}" "trees=[]"
step "3/3 Decode unseen prompts with the chosen head and with fixed lengths, interleaved" \
  drafttrain eval --target checkpoints/gsm8k-target --drafter checkpoints/gsm8k-drafter \
  --head "$run" --stop head --sweep k=3,4 --temperature 1 decode.sampling.top_k=50 \
  decode.sampling.max_new_tokens=128 decode.verifier.kind=block --data "$test" --limit 32 \
  --report "$run/report.json" repeats=1 "baselines=[generate]"
printf '\nDone in %d s: %s, tune.json and plots\n' "$SECONDS" "$run/report.json"
