"""drafttrain: train, measure and serve drafters for speculative decoding."""
