"""Decoders of other libraries as baselines, each in a process of its own."""
