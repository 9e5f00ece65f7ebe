#!/usr/bin/env bash
# Distil on many machines of a Slurm cluster that share nothing but a folder: an array of jobs, each
# with its share of the shards. Whoever ends last completes the manifest; any may be run again.
#   sbatch --array 0-7 launch/slurm_distill.sh --target MODEL --data FILE --out FOLDER
#   PROCESSES=1 sbatch --array 0-7 --gpus-per-node 0 launch/slurm_distill.sh ...     # without GPUs
# Options of sbatch (--partition, --account, --gpus-per-node) override the lines below.
#SBATCH --job-name=drafttrain-distill
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

processes="${PROCESSES:-${SLURM_GPUS_ON_NODE:?submit with --gpus-per-node, or PROCESSES=1 on CPUs}}"
launches="${SLURM_ARRAY_TASK_COUNT:?submit with --array 0-7}"
share="$((SLURM_ARRAY_TASK_ID - SLURM_ARRAY_TASK_MIN))/$launches"
export PATH="$PWD/.venv/bin:$PATH"

source launch/slurm_requeue.sh
requeue_after_term srun accelerate launch --num_machines 1 --num_processes "$processes" \
  --mixed_precision no --dynamo_backend no --main_process_port 0 \
  -m drafttrain distill "$@" "share=$share"
