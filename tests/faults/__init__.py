"""Runs that are killed, run out of disk space, or are damaged."""

ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of the process that starts the stages, set before libraries are loaded. Forking is
safe only with one thread."""
