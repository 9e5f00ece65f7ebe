"""Folders that servers and Transformers load."""
