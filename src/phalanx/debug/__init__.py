"""Find the first collective that does not match between the ranks of a job (`--debug-comm`)."""
