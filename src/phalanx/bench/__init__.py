"""What a machine can do: matrix products, a perceptron, a block under tensor parallelism."""
