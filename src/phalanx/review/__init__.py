"""What finished or running runs say: where time, bytes and memory went, beside the plan."""
