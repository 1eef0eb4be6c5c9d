"""Moves bytes without the application's CPU: libfabric, through a small C core."""
