"""A flag word that a stream of a device counts up behind its copies: puts that are armed on it leave as they are done.

What always holds: a number is seen only after all copies queued before its store are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload.flags import FlagWords

if TYPE_CHECKING:
    from nic_offload.device import Device

__all__ = ["CopyFlag"]


class CopyFlag:
    """One flag word that a side stream counts up behind its copies."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._words = FlagWords.create(1)
        self.word = self._words[0]
        self._mapped = device.map(self.word.address, 8)
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
        self._mapped.close()
        self._words.close()
