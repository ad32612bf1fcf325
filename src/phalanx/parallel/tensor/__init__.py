"""Tensor parallelism: layers that are independent of the layout, and one file for each layout."""
