"""CRC32C by the C core: the one checksum of payloads. The bytes are never copied into Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nic_offload._core import ffi, lib

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["crc32c", "crc32c_at"]


def crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC32C of a buffer; `seed` is the value of the bytes before it."""
    view = ffi.from_buffer(data)
    return int(lib.tk_crc32c(view, len(view), seed))


def crc32c_at(address: int, length: int, seed: int = 0) -> int:
    """CRC32C of memory that the caller keeps alive."""
    return int(lib.tk_crc32c(ffi.cast("void *", address), length, seed))
