"""Find the collective at which the ranks of a job part ways (`--debug-comm`)."""
