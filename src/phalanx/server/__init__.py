"""A parameter server: servers hold the weights, workers push gradients and pull weights."""
