"""Drafters, which propose the draft tokens of a round."""
