"""Plain `nn.Module` models and their shapes; nothing here knows of devices or of other ranks."""
