"""drafttrain: train, measure and serve drafters for speculative decoding."""

__version__ = "0.1.0"
