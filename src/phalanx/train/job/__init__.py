"""Resolve the configuration of a run to a job, before the first rank process starts."""
