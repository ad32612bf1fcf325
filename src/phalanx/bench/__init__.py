"""Benchmarks of this machine: matrix products, collectives, layers, an MLP and scaling."""
