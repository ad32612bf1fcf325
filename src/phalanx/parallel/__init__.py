"""A file or folder for each parallel axis: its memory, its communication, and its split."""
