"""Start the ranks of a job on this host or meet them under torchrun, and watch them."""
