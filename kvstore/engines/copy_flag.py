"""A flag word that a stream of a device counts up behind its copies: puts that are armed on it leave as they are done.

What always holds: a number is seen only after all copies queued before its store are done. If the device can't store to
the word, opening it raises DeviceError or CudaUnavailable, before anything waits for it: some GPUs need a kernel for
the store, and the machine may lack the compiler.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nic_offload.flags import FlagWords

if TYPE_CHECKING:
    from nic_offload.device import Device

__all__ = ["CopyFlag"]


class CopyFlag:
    """One flag word that a side stream counts up behind its copies."""

    def __init__(self, device: Device, stream: object) -> None:
        """All stores are queued on one stream; the first is queued here."""
        self._device = device
        self._words = FlagWords.create(1)
        self.word = self._words[0]
        with ExitStack() as undo:
            undo.callback(self._words.close)
            self._mapped = undo.enter_context(device.map(self.word.address, 8))
            device.store(stream, self._mapped.device_address, 0)
            undo.pop_all()
        self.last = 0  # stored, or queued to be

    def store_next(self, stream: object) -> int:
        """Queue the store of the next number, and return it."""
        self._device.store(stream, self._mapped.device_address, self.last + 1)
        self.last += 1
        return self.last

    def has(self, value: int) -> bool:
        """Whether all copies before this number are done."""
        return self.word.load() >= value

    def close(self) -> None:
        """Wait for the device, and release the word."""
        try:
            self._mapped.close()
        finally:  # a device that is gone doesn't store to it
            self._words.close()
