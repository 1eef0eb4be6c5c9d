"""What keeps the bytes: the storage node, and how to reach it."""
