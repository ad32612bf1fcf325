"""What a run did: time by phase, use of the hardware, and the records of both."""
