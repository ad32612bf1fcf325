"""From a request to a job: all that is decided before the first process starts."""
