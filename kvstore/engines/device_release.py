"""Releases what is page-locked for a device, within a bound, also if the device was reset or never ends its work.

What always holds: `release` returns within ENGINE_DEVICE_CLOSE_MS and raises nothing. Memory that the device may still
write to stays allocated until the driver has returned it.
What it doesn't do: end the device's work.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from kvstore.errors import DeviceError, KvError
from kvstore.limits import ENGINE_DEVICE_CLOSE_MS

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["release"]


class _Closes(Protocol):
    def close(self) -> None: ...


def release(parts: Sequence[_Closes], memory: object) -> KvError | None:
    """Close all parts, each of which waits for the device; return why one was not closed, if so.

    `memory` is referred to until the driver has returned, because the device may access it until then.
    """
    errors: list[KvError] = []

    def close_all(_kept: object) -> None:
        for part in parts:
            try:
                part.close()
            except KvError as error:
                errors.append(error)

    thread = threading.Thread(target=close_all, args=(memory,), name="kvstore-release", daemon=True)
    thread.start()
    thread.join(ENGINE_DEVICE_CLOSE_MS / 1000)
    if thread.is_alive():
        return DeviceError(
            "The device has not ended its work in time; its memory stays page-locked until it has."
        )
    return errors[0] if errors else None
