"""Turns the result of a call of `keep` into a number or an error."""

from __future__ import annotations

import errno

__all__ = ["check"]


def check(outcome: int) -> int:
    """Return a result that isn't negative; raise a negative one: a caller's mistake, or no memory. Nothing changed."""
    if outcome >= 0:
        return outcome
    if outcome == -errno.ENOMEM:
        raise MemoryError("There is no memory for the tables of free and stored blocks.")
    raise AssertionError(
        f"a call that contradicts the known state ({errno.errorcode.get(-outcome, outcome)})"
    )
