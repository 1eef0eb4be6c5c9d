"""What a call of `keep` returned, as a number or as the error that it is."""

from __future__ import annotations

import errno

__all__ = ["check"]


def check(outcome: int) -> int:
    """Return what isn't negative; raise what is: a mistake of the caller's, or no memory. Neither changed anything."""
    if outcome >= 0:
        return outcome
    if outcome == -errno.ENOMEM:
        raise MemoryError("There is no memory to note what is free, or what is stored.")
    raise AssertionError(f"a call that what is known contradicts ({errno.errorcode.get(-outcome, outcome)})")
