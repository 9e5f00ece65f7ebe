# Sourced by the Slurm scripts: a job that is told to stop passes it on, and is queued again.

export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun of Slurm 22.05 and later asks anew

requeue_after_term() {  # requeue_after_term COMMAND...: leaves with the command's exit code
  local code=0 stopped=no job="$SLURM_JOB_ID"
  # of an array, the job's own number is, for one task, that of the whole array too
  if [[ -n "${SLURM_ARRAY_JOB_ID:-}" ]]; then job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"; fi
  "$@" &
  local step=$!
  # Not to srun itself, which would kill its step at once: scancel signals the processes in it. In
  # the background, as it goes on trying where Slurm is ending the job and signals them by itself.
  trap 'stopped=yes; scancel --quiet --signal=TERM "$job" &' TERM
  wait "$step" || code=$?
  while kill -0 "$step" 2> /dev/null; do  # the trap ended the wait before the command had ended
    code=0
    wait "$step" || code=$?
  done
  if [[ "$stopped" == yes && "$code" -ne 0 ]]; then
    echo "stopped with exit code $code; job $job is queued again"
    scontrol requeue "$job"
  fi
  exit "$code"
}
