"""A training loop of one's own, made distributed: `phalanx.init` and what it returns."""
