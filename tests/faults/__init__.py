"""Runs that are killed, run out of disk space, or are damaged."""
