"""Training: one loop on Accelerate, shared by all objectives."""
