"""Prompts, distilled outputs and the batches made from them."""
