"""Memory of a node on the same machine, mapped by its client: hot memory to read, and the client's slots to write.

What always holds: memory is mapped only if its size is sealed, because access to a page that is gone would end the
process. Slots are used only if the node has confirmed them. If anything fails, the client uses the fabric as if there
were no shared memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.limits import ACK_WORDS, GRANTED_PUTS, SHARE_CALL_MS
from kvstore.wire.sharing import HAS_DIRECTORY, HAS_HOT, HAS_SLOTS, MAPPED, ROW_BYTES
from nic_offload.direct import LOG_BYTES
from nic_offload.memory import hide_from_dumps, map_aligned

if TYPE_CHECKING:
    from kvstore.wire import kvstore_pb2 as pb

__all__ = ["MappedMemory", "MappedSlots", "map_shared"]

_SLOTS_FDS = 3
_FDS_MAX = 2 + _SLOTS_FDS
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class MappedSlots:
    """The slots that a connection was granted, and the doorbells of both ends."""

    memory: mmap.mmap
    words_offset: int
    rows_offset: int
    node_doorbell: int
    own_doorbell: int

    def close(self) -> None:
        """Unmap it; nothing uses it any more."""
        os.close(self.node_doorbell)
        os.close(self.own_doorbell)
        self.memory.close()


@dataclass(slots=True)
class MappedMemory:
    """The memory of its node that a client has mapped."""

    hot: mmap.mmap | None = None
    directory: mmap.mmap | None = None  # of that
    slots: MappedSlots | None = None
    is_sure: bool = True  # the node has confirmed `slots`: else none is used, nor over the fabric


def map_shared(offered: pb.SharedMemory, puts: pb.PutArea) -> MappedMemory:
    """Map the memory announced by an attach, as far as it is on this machine and accessible."""
    memory = MappedMemory()
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_node:
        to_node.settimeout(SHARE_CALL_MS / 1000)
        to_node.connect(f"\0{offered.socket}")
        to_node.sendall(offered.pass_once)
        has, fds, _, _ = socket.recv_fds(to_node, 1, _FDS_MAX, socket.MSG_CMSG_CLOEXEC)
        try:
            if has and has[0] & HAS_HOT and fds:
                memory.hot = _mapped(fds[0], offered.size_bytes, mmap.PROT_READ)
            if has and has[0] & HAS_DIRECTORY and len(fds) > 1:
                memory.directory = _mapped(fds[1], offered.directory_bytes, mmap.PROT_READ)
            if has and has[0] & HAS_SLOTS and len(fds) >= _SLOTS_FDS and _fit(offered, puts):
                _map_slots(to_node, offered, fds[-_SLOTS_FDS:], memory)
        finally:
            for fd in fds:
                os.close(fd)
    return memory


def _fit(offered: pb.SharedMemory, puts: pb.PutArea) -> bool:
    slots_end = puts.slots - puts.flags + puts.count * puts.slot_bytes
    return (
        puts.count * _WORD_BYTES <= puts.slots - puts.flags
        and slots_end <= offered.words_offset
        and offered.words_offset + GRANTED_PUTS * _WORD_BYTES <= offered.rows_offset
        and offered.rows_offset + ACK_WORDS * ROW_BYTES <= offered.slots_bytes
        and (not offered.directory_bytes or offered.log_offset + LOG_BYTES <= offered.slots_bytes)
    )


def _map_slots(to_node: socket.socket, offered: pb.SharedMemory, fds: list[int], into: MappedMemory) -> None:
    memory = _mapped(fds[0], offered.slots_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    if memory is None:
        return
    node_doorbell = os.dup(fds[1])
    try:
        own_doorbell = os.dup(fds[2])
    except OSError:
        os.close(node_doorbell)
        raise
    slots = MappedSlots(memory, offered.words_offset, offered.rows_offset, node_doorbell, own_doorbell)
    into.is_sure = False
    try:
        to_node.sendall(MAPPED)
        if to_node.recv(1) == MAPPED:
            into.slots, into.is_sure = slots, True
    finally:
        if into.slots is None:
            slots.close()


def _mapped(fd: int, size_bytes: int, rights: int) -> mmap.mmap | None:
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size_bytes:
        return None
    memory = map_aligned(fd, size_bytes, rights)
    hide_from_dumps(memory)
    return memory
