"""Tensor parallelism: the layers, written once, and a file for each layout."""
