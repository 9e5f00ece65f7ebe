# Shared by the quickstart scripts: how a step is shown, and how Accelerate is started on one process.

step() {  # step TITLE COMMAND...: print, run, and say how long it took
  local title="$1" began=$SECONDS
  shift
  printf '\n== %s\n   %s\n\n' "$title" "$*"
  "$@"
  printf '\n   (%d s)\n' $((SECONDS - began))
}

launch=(accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no
  --dynamo_backend no)
