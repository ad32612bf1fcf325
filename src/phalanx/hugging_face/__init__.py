"""Weights of published models in the Hugging Face layout: read, written, converted, compared."""
