"""Context parallelism: the positions of each sample over ranks, and what attention sends."""
