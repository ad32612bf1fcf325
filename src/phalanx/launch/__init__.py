"""Start the ranks of a job on this host, or join them under torchrun, and monitor them."""
