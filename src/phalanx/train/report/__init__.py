"""What a run says of itself: records of its steps, and its summary."""
