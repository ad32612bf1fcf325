"""Pipelines: the blocks of a model in stages, one rank after another."""
