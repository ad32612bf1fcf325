"""Save sharded checkpoints of a run to disk, and resume from them."""
