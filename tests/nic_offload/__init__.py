"""The fabric, provider by provider: what is promised in `core.h` and `trigger.py`, each promise a test."""
