"""Models that drafttrain trains, and loading of targets and drafters."""
