"""Speculative decoding: one loop with three roles, drafter, stop policy and verifier."""
