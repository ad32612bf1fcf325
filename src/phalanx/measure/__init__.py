"""Measurements of a run: time by phase, memory, hardware utilization, and their logs."""
