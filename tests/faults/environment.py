"""Of the process that starts the stages: to be set before libraries are loaded."""

ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""One thread: only then may a process fork."""
