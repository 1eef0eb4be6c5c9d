"""What an acknowledged block survives: the client's choice for each put."""

from __future__ import annotations

import enum

__all__ = ["Durability"]


class Durability(enum.IntEnum):
    """What a block that was put survives. A higher one includes the lower ones.

        LANDED   it is in the node's memory: survives the client
        WRITTEN  it is on the drive: survives SIGKILL of the node
        SYNCED   the drive has flushed it: survives power loss

    The numbers are those of the proto and of the acknowledgement codes.
    """

    LANDED = 1
    WRITTEN = 2
    SYNCED = 3
