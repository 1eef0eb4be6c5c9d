"""Gets of blocks that are in the memory of a node on the same machine, in the calling thread, without a call.

What always holds: a get is answered completely, with bytes that the node had listed when it began, or not at all; then
the caller makes a call. After `close` nothing is read or written any more. `direct.c` says why.
What it doesn't do: keep the destination's region from being closed; its caller holds it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from nic_offload._core import ffi, lib
from nic_offload.errors import FabricError
from nic_offload.memory import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Buffer

__all__ = ["BLOCKS_MAX", "LOG_BYTES", "DirectReads"]

BLOCKS_MAX: Final = int(lib.TK_DIRECT_BLOCKS)  # in one get
LOG_BYTES: Final = int(lib.TK_READ_LOG_BYTES)
_BLOCK = struct.Struct("=32s3I4x2Q")
_KEY_BYTES, _FINGERPRINT_BYTES = int(lib.TK_KEY_BYTES), int(lib.TK_FINGERPRINT_BYTES)
assert _BLOCK.size == ffi.sizeof("struct tk_direct_block")


class DirectReads:
    """The direct reads over one connection. `read` may be called from any thread."""

    def __init__(self, directory: Buffer, memory: Buffer, log: int, owner: bytes) -> None:
        """Read blocks of this owner in the node's memory, both mapped here until `close`; `log` is an address."""
        setup = ffi.new("struct tk_direct_setup *")
        setup.directory, setup.directory_bytes = address_of(directory), memoryview(directory).nbytes
        setup.memory, setup.memory_bytes = address_of(memory), memoryview(memory).nbytes
        setup.log = log
        ffi.memmove(setup.owner, owner, len(owner))
        out = ffi.new("struct tk_direct **")
        code = lib.tk_direct_open(setup, out)
        if code:
            raise FabricError.from_code("Reading the directory of a node's memory", code)
        self._handle: Any = ffi.gc(out[0], lib.tk_direct_free)

    def read(
        self,
        fingerprint: bytes,
        blocks: Iterable[tuple[bytes, int, int, int, int, int]],
        metadata: bytes,
        bytes_max: int,
    ) -> list[bool] | None:
        """Get blocks; returns of each whether it is in its pieces, or None: make a call.

        Each has its key, length, the first byte of the part that is wanted and its length (0: all), the address where
        it is wanted, and the pointer of its pieces (0: none). `metadata` is that of a call. Blocks
        of more than `bytes_max` together are not read.
        """
        if len(fingerprint) != _FINGERPRINT_BYTES:
            return None
        rows = bytearray().join([_BLOCK.pack(*block) for block in blocks])
        table = ffi.from_buffer("struct tk_direct_block[]", rows)
        metadata += bytes(-len(metadata) % 8)
        count, size = len(table), len(metadata)
        if not lib.tk_direct_read(self._handle, fingerprint, table, count, bytes_max, metadata, size):
            return None
        return [block.is_scattered != 0 for block in table]

    def has_all(self, fingerprint: bytes, keys: Sequence[bytes], metadata: bytes) -> bool:
        """Whether all of these blocks are in the node's memory; if False, make a call."""
        metadata += bytes(-len(metadata) % 8)
        joined = b"".join(keys)
        if len(joined) != _KEY_BYTES * len(keys) or len(fingerprint) != _FINGERPRINT_BYTES:
            return False  # the node says what is wrong with them
        return bool(lib.tk_direct_has(self._handle, fingerprint, joined, len(keys), metadata, len(metadata)))

    @property
    def blocks(self) -> int:
        """How many were read."""
        return int(lib.tk_direct_blocks(self._handle))

    def close(self) -> None:
        """Stop, and wait for reads in progress."""
        lib.tk_direct_close(self._handle)
