"""What a client and its node say to each other over the socket where memory is handed over: docs/wire.md."""

from __future__ import annotations

from typing import Final

__all__ = ["HAS_HOT", "HAS_SLOTS", "MAPPED", "ROW_BYTES"]

HAS_HOT: Final = 1  # of the answer to a pass: a descriptor of the hot memory follows;
HAS_SLOTS: Final = 2  # followed by the slots', the doorbell that the client rings, and the client's own
ROW_BYTES: Final = 64  # for each word of a client's fetches: where the node says in which place a block is
MAPPED: Final = b"\1"  # by a client that has its slots mapped, and in answer to that
