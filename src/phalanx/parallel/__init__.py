"""One file for each way to split the work: what each rank holds, what crosses the wire, and doing it."""
