"""The command line: one thin file for each verb, and main, which chooses among them."""
