"""The root of the project's error tree, and its branches for callers' mistakes, the fabric, GPUs and match-action.

`kvstore.errors` shows the whole tree and re-exports these; the root is here because this package is the lower one. A
miss is a value (`kvstore.miss`), never an exception.
"""

from __future__ import annotations

import errno
import os

__all__ = [
    "Closed",
    "CudaUnavailable",
    "DeviceError",
    "FabricError",
    "FabricStuck",
    "FabricUnavailable",
    "InvalidArgument",
    "KvError",
    "NoMemory",
    "NoProvider",
    "PortTaken",
    "PutFailed",
    "RegionBusy",
    "RuleError",
    "TableFull",
    "UsageError",
    "shown",
]


_SHOWN_MAX = 60  # characters
_STUCK = -errno.EDEADLK  # the C core's TK_STUCK
_UNFLUSHED = -errno.EINPROGRESS  # and its TK_UNFLUSHED


def shown(value: object) -> str:
    """A wrong value for a message: on one line, and shortened if it is long."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."


class KvError(Exception):
    """The base of all errors that this project raises on purpose. The message is one sentence a person can act on."""


class UsageError(KvError):
    """A caller's mistake, found before anything is sent."""


class InvalidArgument(UsageError):
    """An invalid argument: a length, a number of blocks, a time."""


class Closed(UsageError):
    """The object has been closed."""


class FabricError(KvError):
    """libfabric refused, lost or broke an operation."""

    @classmethod
    def from_code(cls, doing: str, code: int) -> FabricError:
        """The one place where a `-errno` of the C core becomes an exception."""
        if code == _STUCK:
            return FabricStuck(
                f"{doing} got no answer: the provider hangs, on shm perhaps because a peer died with its lock."
                " Close the fabric, which may take as long, and open another."
            )
        if code == _UNFLUSHED:
            return cls(
                f"{doing} failed: the NIC keeps operations that it was to drop, so the memory that they use stays"
                " registered; close the endpoint again, or end the process."
            )
        kind = NoMemory if code == -errno.ENOMEM else cls
        return kind(f"{doing} failed: {os.strerror(-code)} ({code}).")


class FabricUnavailable(FabricError):
    """There is no libfabric, or no provider in it, that can carry KV blocks on this machine."""


class NoProvider(FabricError):
    """libfabric has no provider of this name."""


class FabricStuck(FabricError):
    """The fabric's progress thread did not answer in time; every later call except `close` raises this at once."""


class NoMemory(FabricError):
    """The machine has no memory left, or lets no more of it be registered."""


class PortTaken(FabricError):
    """Another socket of this machine listens on the address and port that an endpoint should use."""


class PutFailed(FabricError):
    """An armed put ended in a state other than done, which the message names."""


class RegionBusy(FabricError):
    """The region can't be closed yet: an operation reads from it, or a peer may still write to it."""


class RuleError(KvError):
    """A rule or a request that the match-action table cannot use; nothing was changed."""


class TableFull(KvError):
    """The match-action table is at one of its bounds; nothing was changed."""


class CudaUnavailable(KvError):
    """The CUDA driver, its compiler or a GPU is missing; the message says which."""


class DeviceError(KvError):
    """The device refused work, was reset, or let no more memory be page-locked; what depended on it is a miss."""
