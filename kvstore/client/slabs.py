"""Slabs: a client's own registered memory, in which blocks of pieces are gathered or scattered.

What always holds: a slab has one user at a time; it is not reused while a peer may still write to it, or an operation
still reads from it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.errors import FabricError
from kvstore.limits import SLAB_BYTES, SLABS_KEPT
from nic_offload.errors import RegionBusy
from nic_offload.fabric import is_idle
from nic_offload.memory import set_aside

if TYPE_CHECKING:
    import mmap

    from nic_offload.fabric import Fabric, Region

__all__ = ["Slab", "Slabs"]


class Slab(NamedTuple):
    """One registered piece of memory."""

    region: Region
    memory: mmap.mmap


class _HasFabric(Protocol):
    @property
    def fabric(self) -> Fabric:
        """The fabric that they are registered with."""
        ...


class Slabs:
    """The slabs of one client. Any thread. They are freed with its fabric."""

    def __init__(self, client: _HasFabric) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._free: list[Slab] = []
        self._used: list[Slab] = []  # given back, and something may still use them

    def take(self, size_bytes: int) -> Slab:
        """Take a slab of at least `length` bytes; FabricError if there is no memory for it."""
        with self._lock:
            self._close_used()
            if size_bytes <= SLAB_BYTES and self._free:
                return self._free.pop()
        memory = set_aside(max(size_bytes, SLAB_BYTES))
        try:
            return Slab(self._client.fabric.register(memory), memory)
        except FabricError:
            memory.close()
            raise

    def give_back(self, slab: Slab) -> None:
        """Give a slab back."""
        with self._lock:
            if is_idle(slab.region) and len(slab.memory) == SLAB_BYTES and len(self._free) < SLABS_KEPT:
                self._free.append(slab)
            else:
                self._used.append(slab)
                self._close_used()

    def _close_used(self) -> None:
        used, self._used = self._used, []
        for slab in used:
            try:
                slab.region.close()
            except RegionBusy:
                self._used.append(slab)
            else:
                with suppress(BufferError):
                    slab.memory.close()
