"""Save a run to disk and go on from it."""
