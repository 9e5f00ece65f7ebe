#!/usr/bin/env bash
# Train a recipe, or distil, on machines of a Slurm cluster; continues by itself after pre-emption.
#   sbatch launch/slurm_train.sh recipes/train_spec_drafter.py --config my.yaml train.precision=bf16
#   sbatch launch/slurm_train.sh -m drafttrain distill --config distill.yaml
#   sbatch --nodes 4 --export ALL,LAUNCH_FILE=launch/fsdp2.yaml launch/slurm_train.sh recipes/...
#   ACCELERATE_USE_CPU=true PROCESSES=2 LAUNCH_FILE=launch/cpu_2.yaml \
#     sbatch --gpus-per-node 0 launch/slurm_train.sh recipes/...                  # without GPUs
# PROCESSES counts those of one machine; default: its GPUs.
# Submit from the repository's folder, which all machines must see, as the run folder. Options of
# sbatch (--partition, --account, --nodes, --gpus-per-node) override the lines below.
#SBATCH --job-name=drafttrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

file="${LAUNCH_FILE:-launch/ddp.yaml}"
processes="${PROCESSES:-${SLURM_GPUS_ON_NODE:?submit with --gpus-per-node, or PROCESSES=1 on CPUs}}"
if grep -q "distributed_type: 'NO'" "$file"; then  # its launcher would die of SIGTERM, and the step
  echo "LAUNCH_FILE=$file starts one process by itself; use launch/ddp.yaml or another one" >&2
  exit 2
fi
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
first="${hosts%%$'\n'*}"  # no `| head`: scontrol would die of the closed pipe, and pipefail with it
export PATH="$PWD/.venv/bin:$PATH"

# One task a machine; each starts the processes of its own. SIGTERM, sent by --signal before the time
# is up, reaches every process of every task: they write a checkpoint and leave.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # seconds until the launcher kills: less than --signal's
export launch_options="--config_file $file --num_machines $SLURM_NNODES \
  --num_processes $((SLURM_NNODES * processes)) --main_process_ip $first \
  --main_process_port $((20000 + SLURM_JOB_ID % 20000))"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun of Slurm 22.05 and later asks anew

stopped=no code=0
srun --kill-on-bad-exit=1 bash -c \
  'exec accelerate launch $launch_options --machine_rank "$SLURM_NODEID" "$@"' launch "$@" &
step=$!
# Not to srun itself, which would kill its step at once: scancel signals the processes in it. In
# the background, as it keeps trying where Slurm is ending the job and signals them by itself.
trap 'stopped=yes; scancel --quiet --signal=TERM "$SLURM_JOB_ID" &' TERM
wait "$step" || code=$?
while kill -0 "$step" 2> /dev/null; do  # the trap ended the wait before the command had ended
  code=0
  wait "$step" || code=$?
done
if [[ "$stopped" == yes && "$code" -ne 0 ]]; then
  echo "stopped with exit code $code; job $SLURM_JOB_ID is queued again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
