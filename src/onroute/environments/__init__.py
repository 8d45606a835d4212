"""What gives prompts and rewards."""
