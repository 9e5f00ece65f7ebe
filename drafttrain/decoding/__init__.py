"""One loop, three roles: drafter, stop policy, verifier."""
