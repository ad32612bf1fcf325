"""Counts of memory, FLOPs and kernels of a strategy, before a launch and without process groups."""
