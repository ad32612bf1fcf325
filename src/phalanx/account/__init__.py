"""What a split will cost, counted before a launch. Nothing here starts a process group."""
