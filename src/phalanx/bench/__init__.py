"""What a machine can do: matrix products, a perceptron, a block under tp, a pipeline."""
