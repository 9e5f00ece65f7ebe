# Shared by the quickstart scripts: how a step is shown.

step() {  # step TITLE COMMAND...: print, run, and say how long it took
  local title="$1" began=$SECONDS
  shift
  printf '\n== %s\n   %s\n\n' "$title" "$*"
  "$@"
  printf '\n   (%d s)\n' $((SECONDS - began))
}
