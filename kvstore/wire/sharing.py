"""The messages between a client and its node on the socket over which memory is passed: docs/wire.md."""

from __future__ import annotations

from typing import Final

__all__ = ["HAS_DIRECTORY", "HAS_HOT", "HAS_SLOTS", "MAPPED", "ROW_BYTES"]

HAS_HOT: Final = 1  # in the answer to a pass: a descriptor of the hot memory follows;
HAS_DIRECTORY: Final = 4  # then one of its directory;
HAS_SLOTS: Final = 2  # then the slots', the doorbell that the client rings, and the client's own
ROW_BYTES: Final = 64  # for each word of a client's fetches: where the node gives a block's location
MAPPED: Final = b"\1"  # sent by a client that has mapped its slots, and in answer to that
