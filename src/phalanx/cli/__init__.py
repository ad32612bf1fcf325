"""The command line: one module for each verb, and `main`, which runs the chosen verb."""
