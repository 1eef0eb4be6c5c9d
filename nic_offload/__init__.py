"""What moves the bytes, with no CPU in the way: libfabric through a small C core."""
