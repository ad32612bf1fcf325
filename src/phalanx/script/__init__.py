"""Distributed training from a user's own loop (`phalanx.init`, `Run`), and the Trainer."""
