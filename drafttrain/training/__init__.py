"""One training loop on Accelerate for every objective."""
