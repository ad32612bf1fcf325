"""A file for each way to split the work: it answers what ranks hold and send, and does it."""
