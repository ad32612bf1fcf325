"""Collectives written over point-to-point messages: lists of steps, and what runs them."""
