"""Context parallelism: positions of each sample split over ranks, and attention across ranks."""
