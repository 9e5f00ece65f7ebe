"""Models that drafttrain trains, and how targets are loaded."""
