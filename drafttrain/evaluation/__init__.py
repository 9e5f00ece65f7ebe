"""What a drafter is worth: acceptance, speed, quality."""
