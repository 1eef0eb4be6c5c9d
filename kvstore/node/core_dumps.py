"""Disables core dumps, and access by other processes of the same user to the node's memory.

What always holds: this happens before a drive is opened or a key is read. What it doesn't do: keep root out.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource

__all__ = ["keep_out_of_dumps"]

log = logging.getLogger(__name__)

_PR_SET_DUMPABLE = 4


def keep_out_of_dumps() -> None:
    """Exclude this process from core dumps; if the kernel refuses, log it and go on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        log.warning("The kernel keeps core dumps of this process: %s.", os.strerror(ctypes.get_errno()))
