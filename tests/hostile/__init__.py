"""Attacks beside a well-behaved neighbour: what one token, or none, can do to somebody else."""
