"""Counters: operations wait for them, and increment them when they complete.

A counter over a flag word (`Fabric.open_counter(word)`) has that word's value: any process that maps the word can
store to it, and the fabric's thread sees the new value. A counter without a word belongs to the NIC if it has
doorbells (cxi), so that a store to the doorbell fires operations without a thread of ours; on other NICs it is a word
of ours.

What always holds: a counter only grows until it is reset, and is reset only while nothing waits for it and nothing
will increment it. If an operation that should have incremented it fails, the counter fails: it no longer changes, and
everything that waits for it fails too.

A flag word's memory stays mapped for as long as the fabric may read it, whatever is closed first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from nic_offload.fabric import Fabric
    from nic_offload.flags import FlagWord

__all__ = ["Counter", "Doorbell"]


class Doorbell(NamedTuple):
    """The address at which a 64-bit store moves a counter: by the stored value if `adds`, otherwise to it."""

    address: int
    adds: bool


class Counter(Handle):
    """A count that operations wait for."""

    def __init__(self, fabric: Fabric, word: FlagWord | None) -> None:
        self._fabric = fabric
        self._word = word
        out = ffi.new("struct tk_counter **")
        address, bell_address, pipe_fd = (0, 0, -1) if word is None else word.place
        pointer, bell = ffi.cast("void *", address), ffi.cast("struct tk_bell *", bell_address)
        self._check(lib.tk_counter_open(fabric.handle, pointer, bell, pipe_fd, out), "Opening a counter")
        self.handle: Any = out[0]
        self.pointer = int(ffi.cast("uintptr_t", self.handle))
        fabric.counters.add(self)

    @staticmethod
    def _check(code: int, doing: str) -> None:
        if code:
            raise FabricError.from_code(doing, code)

    @property
    def failed(self) -> bool:
        """Whether an operation that was to move it failed."""
        return bool(lib.tk_counter_failed(self.handle))

    def value(self) -> int:
        """Its count."""
        out = ffi.new("uint64_t *")
        self._check(lib.tk_counter_read(self.handle, out), "Reading a counter")
        return int(out[0])

    def add(self, value: int) -> None:
        """Publish everything written before, then add to the counter: this is what fires operations."""
        self._check(lib.tk_counter_add(self.handle, value), "Adding to a counter")

    def set(self, value: int) -> None:
        """Move the counter to a value that is not below its current one."""
        self._check(lib.tk_counter_set(self.handle, value), "Setting a counter")

    def reset(self) -> None:
        """Back to zero, and to not failed. Refused while anything waits for it or is to move it."""
        self._check(lib.tk_counter_reset(self.handle), "Resetting a counter")

    def doorbell(self) -> Doorbell:
        """Where a GPU, or another process, stores to move it."""
        address, adds = ffi.new("uint64_t *"), ffi.new("int *")
        self._check(lib.tk_counter_doorbell(self.handle, address, adds), "Getting a counter's doorbell")
        return Doorbell(int(address[0]), bool(adds[0]))

    def close(self) -> None:
        """Release it. What waits for it keeps waiting, and the counter exists until then."""
        if self.handle is None:
            return
        self._check(lib.tk_counter_close(self.handle), "Closing a counter")
        if self._word is not None:
            self._fabric.keep_word(self._word)
        self.detach()

    def detach(self) -> None:
        """Mark the handle as closed: the fabric that owned it is closed, or is closing it."""
        self.handle, self.pointer = None, 0
        self._fabric.counters.discard(self)
