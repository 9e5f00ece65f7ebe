"""Runs that are killed, starved and damaged."""

ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Of the process that starts the stages, before libraries are loaded. One thread: only then may it
fork."""
