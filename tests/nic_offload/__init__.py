"""The fabric, provider by provider: a test for each guarantee of `core.h` and `trigger.py`."""
