"""One file for each way to split the work: what is held, what is sent, and doing it."""
