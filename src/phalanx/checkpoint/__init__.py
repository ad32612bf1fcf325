"""Save a run to disk and resume from it."""
