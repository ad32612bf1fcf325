"""What a method does, from a real run: topics, and what prints and draws any of them."""
