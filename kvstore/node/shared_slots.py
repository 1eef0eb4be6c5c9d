"""The slots granted to one client, in memory that it may map, with the words that acknowledge its puts.

After them follows a row for each word of its fetches, which tells the client where in the hot memory a block is
(`nic_offload/shared_reads.c`), and the log of its direct reads (`nic_offload/desk_log.c`).

Each end has a doorbell that wakes its fabric's thread (`nic_offload/shared_puts.c`). A client gets the descriptors
once: of the memory, of the eventfd that it rings, and of the pipe that the node rings.

What always holds: the memory's size is sealed; nothing is put there before the client has confirmed the mapping; no
call of the node on a descriptor that a client also has can block. What it doesn't do: contain anything of another
connection.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.limits import ACK_WORDS, GRANTED_PUTS, PAGE_BYTES
from kvstore.wire.sharing import ROW_BYTES
from nic_offload.direct import LOG_BYTES
from nic_offload.memory import address_of, allocate_mapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.node.connection import Connection
    from nic_offload.fabric import Fabric, Region

__all__ = ["SharedSlots"]

_WORDS_BYTES = -(-GRANTED_PUTS * 8 // PAGE_BYTES) * PAGE_BYTES
_ROWS_BYTES = -(-ACK_WORDS * ROW_BYTES // PAGE_BYTES) * PAGE_BYTES


class SharedSlots:
    """The shared slots of a connection."""

    def __init__(self, fabric: Fabric, slots_bytes: int) -> None:
        """NoMemory if no descriptor or no memory is left. `slots_bytes`: flags and slots, in whole pages."""
        self.words_offset = slots_bytes
        self.rows_offset = slots_bytes + _WORDS_BYTES
        self.log_offset = self.rows_offset + _ROWS_BYTES
        self.size_bytes = self.log_offset + LOG_BYTES
        self._fabric = fabric
        self.memory, self._fd = allocate_mapped(self.size_bytes)
        self.is_mapped = False
        self._own_doorbell = self._doorbell = -1  # what wakes us, and wakes the client

    def hand_over(self, give: Callable[[list[int]], None]) -> None:
        """Give the client the memory, the doorbell that it rings, and the one that it waits for. Once."""
        self._own_doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        heard, self._doorbell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            give([self._fd, self._own_doorbell, heard])
        finally:
            os.close(heard)

    def mapped(self, connection: Connection, hot: Region | None, *, looks: bool) -> None:
        """Note that the client has mapped the memory, and watches its words there.

        `hot`: memory that it can read; `looks`: it looks for words in its rows, too.
        """
        self.is_mapped = True
        self._fabric.listen(self._own_doorbell, is_pipe=False)
        acks = connection.acks
        here = address_of(self.memory)
        words, rows = here + self.words_offset, here + self.rows_offset
        connection.endpoint.share_words(acks.target(ACK_WORDS), acks.key, words, GRANTED_PUTS, self._doorbell)
        if hot is not None:
            connection.endpoint.share_reads(acks.target(0), acks.key, rows, ACK_WORDS, hot, looks=looks)
        self.withhold()

    @property
    def log(self) -> int:
        """The address of the log of its client's direct reads."""
        return address_of(self.memory) + self.log_offset

    def withhold(self) -> None:
        """Let no other process map the memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Free the memory of a connection whose endpoint is closed."""
        if self._own_doorbell >= 0:
            self._fabric.ignore(self._own_doorbell)  # the client may keep its copy open indefinitely
        for doorbell in (self._own_doorbell, self._doorbell):
            if doorbell >= 0:
                os.close(doorbell)
        self.withhold()
        self.memory.close()
