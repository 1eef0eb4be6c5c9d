"""A miss is a value: the block is not served, for a stated reason. The caller recomputes.

The numbers are sent in ack words (`kvstore.wire.ack`) and in gRPC answers, so they never change meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Miss", "MissReason"]


class MissReason(enum.IntEnum):
    """Why a block was not served."""

    UNKNOWN = 1  # never stored here, deleted, or removed too long ago to be remembered
    CORRUPT = 2  # stored, but the bytes on the drive failed a check
    LAYOUT = 3  # stored under another layout fingerprint
    EXPIRED = 4  # its time to live is over, or was not long ago
    LENGTH = 5  # stored with another length than requested
    UNREADABLE = 6  # the drive answered with an error
    NODE_AWAY = 7  # the node did not answer in time; reported by clients only
    BUSY = 8  # the node was at a limit and did not start
    EVICTED = 9  # evicted for room; known for the latest removals only
    QUOTA = 10  # evicted because its tenant was at its quota and put more; known for the latest removals only
    ERASED = 11  # it was erased, with its user or its tenant

    @classmethod
    def _missing_(cls, value: object) -> MissReason | None:
        """Map a newer node's unknown number to a known reason."""
        return cls.UNKNOWN if isinstance(value, int) else None


@dataclass(frozen=True, slots=True)
class Miss:
    """One block that was not served."""

    reason: MissReason
    detail: str = ""

    def __str__(self) -> str:
        text = f"MISS({self.reason.name.lower()})"
        return f"{text}: {self.detail}" if self.detail else text
