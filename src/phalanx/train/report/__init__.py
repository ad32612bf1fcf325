"""Record the steps of a run, and summarize the run at its end."""
