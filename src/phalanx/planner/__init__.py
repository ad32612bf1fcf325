"""Planning a run before it starts: hardware descriptions, cost models and the strategy search."""
