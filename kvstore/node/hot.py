"""The node's hot memory: reads from the drive go through it, and blocks that are requested again stay in it.

A piece is a run of pages, `[header page | payload]`, as on the drive. A read takes one; when the record's header has
been checked, the piece is kept under its generation, and the next read of that record finds it without the drive.
Kept pieces that are not in use are evicted for new reads (`kvstore.node.hot_pages`).

Always holds:

- A piece in use is never given to another read. A piece is found only under exactly its generation, which no two
  records share, so a record that was replaced or deleted is never found by callers that ask the index first.
- The shelf (`nic_offload.shelf`) lists what the index has: a block is listed in the step in which that was seen, and
  `changed` is called in the step in which it ends. A piece that the shelf is sending is in use.
- A piece is kept only while the index has its record: when a record is deleted, evicted, replaced, expires or is
  found damaged, its piece is released in that step or, if it is in use, when its last user is done. The piece of an
  erased block is overwritten then, even if the block was still being read when it was erased.
- Half of the memory is divided among the node's tenants. What a tenant keeps in its part is evicted for its own reads,
  and for others' only if nothing else can be: no read waits for kept pieces.
- A scan does not flush it: pieces that were found again are protected (up to four fifths of the pages), and the
  unprotected ones are evicted first, oldest first.

What it doesn't do: check payloads, which are checked at each send; or copy what is put, which would cost the node a
core.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.errors import FabricError
from kvstore.limits import HEADER_BYTES, PAGE_BYTES
from kvstore.node.fair_queue import Shares
from kvstore.node.hot_pages import HotPages, Uses
from kvstore.node.landing import pages_of
from kvstore.storage.index_layout import names_in, names_of
from nic_offload.memory import allocate_shared
from nic_offload.shelf import Shelf, Shelved, directory_bytes

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.node.hot_pages import Piece
    from kvstore.storage.index import Entry
    from nic_offload.fabric import Fabric

Name: TypeAlias = "tuple[bytes, bytes]"

__all__ = ["HotMemory", "Name"]

log = logging.getLogger(__name__)


class HotMemory:
    """The pages, registered with the fabric."""

    def __init__(
        self,
        fabric: Fabric,
        size_bytes: int,
        freed: Callable[[], object],
        tenants: Callable[[], int],
    ) -> None:
        self.size_bytes = size_bytes
        self._memory, self.fd = allocate_shared(size_bytes)
        self.region = fabric.register(self._memory, remote_write=False)
        self.shelf = Shelf(fabric, self.region)
        uses = Uses(*self.shelf.uses, lambda: fabric.closed)
        self.pages = HotPages(size_bytes // PAGE_BYTES, freed, uses, tenants, self.region.address)
        self.shares = Shares(size_bytes, tenants)
        self.view = memoryview(self._memory)
        self._directory: tuple[mmap.mmap, int] | None = None
        self._expected: dict[Name, int] = {}  # generations being read, if the index has named them throughout

    def open_directory(self) -> tuple[int, int] | None:
        """Keep a directory for clients that read blocks by themselves: its descriptor and size; None if it can't be.

        Nothing is on the shelf yet.
        """
        try:
            memory, fd = allocate_shared(directory_bytes(self.size_bytes // (2 * PAGE_BYTES)))
            self._directory = memory, fd  # kept in any case: a fabric that hangs may still use it
            self.shelf.share(memory)
        except FabricError as error:
            log.warning("clients on this machine make a call for each get: %s", error)
            return None
        return fd, len(memory)

    def take(self, length_bytes: int, tenant: bytes) -> Piece | None:
        """Allocate a piece for a tenant's record with a payload of this length."""
        return self.pages.take(pages_of(length_bytes), tenant)

    def address(self, piece: Piece) -> int:
        """The address of a piece's header page in this process."""
        return self.region.address + self.pages.start(piece) * PAGE_BYTES

    def size(self, piece: Piece) -> int:
        """The bytes of a piece."""
        return self.pages.size([piece])

    def payload(self, piece: Piece, length_bytes: int) -> memoryview:
        """A view of the payload in a piece."""
        start = self.pages.start(piece) * PAGE_BYTES + HEADER_BYTES
        return self.view[start : start + length_bytes]

    def shelve(self, found: Iterable[tuple[bytes, bytes, Entry | None]]) -> None:
        """List blocks on the shelf, so that the C core serves them: tenant, key and current index entry of each.

        Blocks that expire are not listed, because the shelf has no clock.
        """
        blocks = []
        for tenant, key, entry in found:
            piece = None if entry is None or entry.expires_ms else self.pages.peek(entry.generation)
            if piece is not None and entry is not None:
                payload = self.address(piece) + HEADER_BYTES
                blocks.append(
                    Shelved(
                        tenant, key, entry.fingerprint, entry.generation, payload, entry.length, entry.crc32c
                    )
                )
        if blocks:
            self.shelf.put(blocks)

    def keep(self, found: Iterable[tuple[Piece, int, Name, Entry | None]]) -> None:
        """Keep records that were read, if the index still names them, and list them on the shelf."""
        kept = []
        for piece, generation, name, entry in found:
            if entry is not None and entry.generation == generation:
                self.pages.keep(piece, generation, *name)
                kept.append((*name, entry))
        self.shelve(kept)

    def expect(self, name: Name, generation: int) -> None:
        """Note that a read of this record, which the index names now, has begun."""
        self._expected[name] = generation

    def came(self, found: Iterable[tuple[Piece | None, Name, Entry | None]]) -> None:
        """Keep records that were read and sent, if the index has named them since `expect`, and shelve them."""
        kept = []
        for piece, name, entry in found:
            if entry is None or piece is None:
                continue
            if self._expected.get(name) == entry.generation:
                del self._expected[name]
            elif not self.pages.has(entry.generation):
                continue
            self.pages.keep(piece, entry.generation, *name)
            kept.append((*name, entry))
        self.shelve(kept)

    def expect_no_more(self, name: Name) -> None:
        """Note that the read failed."""
        self._expected.pop(name, None)

    def changed(self, rows: NDArray[Any], *, are_new: bool, are_erased: bool = False) -> None:
        """Note blocks, given as the index's rows, that it has from now on, or no longer.

        New blocks that landed by a grant stay listed: the index can only have their own records. The core knows the
        places of new blocks already (`cold_calls`), so that a get in between finds one or the other.
        """
        names = names_in(rows).tobytes()
        self.unlist(names, are_new=are_new)
        for name in names_of(rows) if self._expected else ():
            self._expected.pop(name, None)
        if are_erased:
            self.pages.erase(names)
        if are_new:
            self.pages.replace(names, rows["generation"])
        else:
            self.pages.drop(rows["generation"])

    def erased(self, names: Sequence[Name]) -> None:
        """Drop and overwrite blocks, whether or not the index still has them."""
        joined = b"".join(map(b"".join, names))
        self.unlist(joined)
        for name in names:
            self._expected.pop(name, None)
        self.pages.erase(joined)

    def unlist(self, names: bytes, *, are_new: bool = False) -> None:
        """Stop the C core from sending these; it may send new blocks of these names that land later."""
        self.shelf.unlist(names, others_only=are_new)

    def stored(self, names: Iterable[Name]) -> None:
        """Note that these names are stored, so that later puts of them are compared with the stored block."""
        self.shelf.stored(b"".join(map(b"".join, names)), are_stored=True)

    def gone(self, names: bytes) -> None:
        """Note that these names are no longer stored."""
        self.shelf.stored(names, are_stored=False)

    def close(self) -> None:
        """Free the memory. The fabric must be closed already."""
        self.view.release()
        self._memory.close()
        os.close(self.fd)
        if self._directory is not None:
            memory, fd = self._directory
            memory.close()
            os.close(fd)
