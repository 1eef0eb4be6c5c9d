"""Attacks beside a well-behaved neighbour: the harm that a caller with one token, or none, can do to others."""
