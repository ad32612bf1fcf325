"""A parameter server: servers store the weights, workers push gradients and pull weights."""
