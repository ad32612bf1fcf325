"""Gradients that travel in fewer bytes over a slow dp; none keeps what a sum in float32 would."""
