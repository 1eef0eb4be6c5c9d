"""What an acknowledged block survives: the client's choice for each put."""

from __future__ import annotations

import enum

__all__ = ["Durability"]


class Durability(enum.IntEnum):
    """LANDED: in the node's memory; WRITTEN: on its drive, survives SIGKILL; SYNCED: flushed, survives power loss.

    The numbers are those of the proto and of the acknowledgement codes; more is safer.
    """

    LANDED = 1  # it is in the node's memory: survives the client
    WRITTEN = 2  # it is on the drive: survives the node's process
    SYNCED = 3  # the drive has flushed it: survives power loss
