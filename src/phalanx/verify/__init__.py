"""Compare a strategy with one process, in every number on which training depends."""
