# Sourced by the Slurm scripts: a job that is told to stop passes it on, and is queued again.

requeue_after_term() {  # requeue_after_term COMMAND...: leaves with the command's exit code
  local code=0 stopped=no
  "$@" &
  local step=$!
  trap 'stopped=yes; kill -TERM "$step"' TERM
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
}
