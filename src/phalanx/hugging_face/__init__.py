"""Weights of published models in the Hugging Face layout: read, write, convert, compare."""
