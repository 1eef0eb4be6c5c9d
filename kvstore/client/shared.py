"""A node's hot memory, mapped by a client on the same machine, to be read.

What always holds: it is mapped only if its size can't change any more, because a page that goes would end the process
that reads it; whatever stands in the way, a client reads over the fabric as if there were no such memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from kvstore.limits import SHARE_CALL_MS
from nic_offload.memory import hide_from_dumps

if TYPE_CHECKING:
    from kvstore.wire import kvstore_pb2 as pb

__all__ = ["map_shared"]


def map_shared(told: pb.SharedMemory) -> mmap.mmap | None:
    """The memory that an attach has told of; None if it is not on this machine, or can't be had."""
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to_node:
        to_node.settimeout(SHARE_CALL_MS / 1000)
        to_node.connect(f"\0{told.socket}")
        to_node.sendall(told.pass_once)
        _, fds, _, _ = socket.recv_fds(to_node, 1, 1)
        return _mapped(fds[0], told.size_bytes) if fds else None
    return None


def _mapped(fd: int, size_bytes: int) -> mmap.mmap | None:
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(fd).st_size != size_bytes:
            return None
        memory = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    hide_from_dumps(memory)
    return memory
