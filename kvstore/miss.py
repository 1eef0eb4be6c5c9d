"""A miss is a value: the block is not served, for a stated reason. The caller recomputes.

The numbers are sent in ack words (`kvstore.wire.ack`) and in gRPC answers, so they never change meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Miss", "MissReason"]


class MissReason(enum.IntEnum):
    """Why a block was not served.

        UNKNOWN     not stored: never put to this node, deleted, or removed too long ago to be remembered
        CORRUPT     the bytes on the drive failed a check, when they were read for this request or before
        LAYOUT      stored under another layout
        EXPIRED     its time to live is over
        LENGTH      stored with another length than the one requested
        UNREADABLE  the drive returned an error
        NODE_AWAY   the node did not answer in time; only clients report this
        BUSY        the node was at a limit, and did not begin; try again
        EVICTED     evicted to make room
        QUOTA       evicted because its tenant was at its quota and put more
        ERASED      erased, with its user or its tenant

    A node remembers only its latest removals; the reason of an earlier one is UNKNOWN.
    """

    UNKNOWN = 1
    CORRUPT = 2
    LAYOUT = 3
    EXPIRED = 4
    LENGTH = 5
    UNREADABLE = 6
    NODE_AWAY = 7
    BUSY = 8
    EVICTED = 9
    QUOTA = 10
    ERASED = 11

    @property
    def words(self) -> str:
        """It for people, such as `not stored`."""
        return "not stored" if self is MissReason.UNKNOWN else self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> MissReason | None:
        """Map a newer node's unknown number to a known reason."""
        return cls.UNKNOWN if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Miss:
    """A block that was not served, and why. It is a result, not an exception: the caller computes the block.

    >>> from kvstore import Miss, MissReason
    >>> print(Miss(MissReason.EVICTED))
    MISS(evicted)
    """

    reason: MissReason
    detail: str = ""

    def __str__(self) -> str:
        text = f"MISS({self.reason.words})"
        return f"{text}: {self.detail}" if self.detail else text
