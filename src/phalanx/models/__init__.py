"""Plain `nn.Module` models and their shapes, independent of devices and of other ranks."""
