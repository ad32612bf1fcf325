"""Pipeline parallelism: the layers of a model as stages on different ranks."""
