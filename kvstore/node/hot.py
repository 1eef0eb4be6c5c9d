"""The node's hot memory: reads from the drive go through it, and blocks that are requested again stay in it.

A piece is a run of pages, `[header page | payload]`, as on the drive. A read takes one; when the record's header has
been checked, the piece is kept under its generation, and the next read of that record finds it without the drive.
Kept pieces that are not in use are evicted for new reads.

Always holds:

- A piece in use is never given to another read. A piece is found only under exactly its generation, which no two
  records share, so a record that was replaced or deleted is never found by callers that ask the index first.
- The shelf (`nic_offload.shelf`) lists what the index has: a block is listed in the step in which that was seen, and
  `changed` is called in the step in which it ends. A piece that the shelf is sending is in use.
- Pieces are kept by name only while the index has the name: when a record is deleted, evicted, replaced, expires or is
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

import ctypes
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvstore.limits import HEADER_BYTES, PAGE_BYTES
from kvstore.node.fair import Shares
from kvstore.node.landing import pages_of
from kvstore.storage.extents import Extents
from nic_offload.memory import allocate_shared
from nic_offload.shelf import Shelf, Shelved

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from kvstore.storage.index import Entry
    from nic_offload.fabric import Fabric

Name: TypeAlias = "tuple[bytes, bytes]"
Lookup: TypeAlias = "Callable[[Sequence[Name]], Sequence[Entry | None]]"

__all__ = ["HotMemory", "HotPages", "HotStatistics", "Piece"]


@dataclass(slots=True)
class Piece:
    """A run of pages, and its refcount."""

    start: int
    pages: int
    users: int = 1
    generation: int = 0  # of the kept record; 0: none
    name: Name | None = None  # of that record, if given
    is_erased: bool = False  # to be overwritten as soon as it is unused
    wipes: int = 0  # the count of `HotPages` when the index was last known to have its record


@dataclass(frozen=True, slots=True)
class HotStatistics:
    """How much the hot memory holds, and how often blocks were found there."""

    capacity_bytes: int
    kept_bytes: int
    protected_bytes: int
    kept: int
    found: int
    not_found: int
    evicted: int


class HotPages:
    """Which pages hold which records. It touches no memory and does no I/O."""

    def __init__(
        self,
        pages: int,
        freed: Callable[[], object],
        may_go: Callable[[Sequence[int]], Sequence[bool]] = lambda generations: [True] * len(generations),
        tenants: Callable[[], int] = lambda: 1,
        wipe: Callable[[int, int], object] = lambda *_: None,
    ) -> None:
        """`freed` is called when a piece is released after one was refused.

        `may_go` ends all uses of generations that are not counted here; False for each until they have ended.
        `tenants` returns how many tenants the node knows. `wipe` overwrites pages, given the first and their number.
        """
        self._wipe = wipe
        self._tenants = tenants
        self._kept_of: dict[bytes, int] = {}  # pages, by tenant
        self._freed = freed
        self._may_go = may_go
        self._named: dict[Name, int] = {}  # generation kept under each name
        self._going: dict[int, Piece] = {}  # forgotten but still in use elsewhere, by former generation
        self.refused = False
        self._pages = pages
        self._protected_pages_max = pages * 4 // 5
        self._free = Extents(0, pages)
        self.used_until = 0  # pages from here on were never used
        self._wipes = 0  # passes over free pages that have begun
        self._unwiped: int | None = None  # the next page of the pass in progress; None: there is none
        self._probation: OrderedDict[int, Piece] = OrderedDict()  # by generation, oldest first
        self._protected: OrderedDict[int, Piece] = OrderedDict()
        self._protected_pages = 0
        self._kept_pages = 0
        self._found = self._not_found = self._evicted = 0

    def take(self, pages: int, tenant: Hashable = b"") -> Piece | None:
        """Allocate a piece for a tenant's read, with one user; None if everything evictable is in use."""
        start = self._free.allocate(pages)
        if start is None and self._going:
            self._free_what_went()
            start = self._free.allocate(pages)
        while start is None:
            if not self._evict_one(tenant):
                self.refused = True
                return None
            start = self._free.allocate(pages)
        return self._taken(start, pages)

    def _taken(self, start: int, pages: int) -> Piece:
        self.used_until = max(self.used_until, start + pages)
        if self._unwiped is not None and start + pages > self._unwiped:
            self._wipe(start, pages)  # the pass would miss it
        return Piece(start, pages, wipes=self._wipes)

    def take_many(self, pages: int, most: int) -> list[Piece]:
        """Allocate pieces of one size that nobody has requested, as many as there are; like `take_unasked`."""
        taken: list[Piece] = []
        while len(taken) < most and (piece := self.take_unasked(pages)) is not None:
            taken.append(piece)
            if not self._free.longest >= pages:
                taken += self._reuse(pages, most - len(taken))
        return taken

    def _reuse(self, pages: int, most: int) -> list[Piece]:
        """Evict the oldest kept pieces, as far as they have this size and no user, and take them at once."""
        oldest: list[Piece] = []
        for piece in self._probation.values():
            if len(oldest) == most or piece.pages != pages or piece.users or not self._may_lose(piece, most):
                break
            oldest.append(piece)
        reused = []
        for piece, may_go in zip(oldest, self._may_go([one.generation for one in oldest]), strict=True):
            if may_go:
                self._evicted += 1
                self._no_longer_keep(piece)
                self._wipe_if_due(piece)
                reused.append(self._taken(piece.start, pages))
        return reused

    def _may_lose(self, piece: Piece, pieces: int) -> bool:
        """Return whether the owner of a piece keeps more than what is guaranteed, even without so many of this size."""
        tenants = self._tenants()
        if tenants <= 1 or piece.name is None:
            return True
        return self._kept_of[piece.name[0]] - pieces * piece.pages >= self._pages // (2 * tenants)

    def take_unasked(self, pages: int) -> Piece | None:
        """Allocate a piece for a read that nobody has requested; None while requested reads wait for memory."""
        refused = self.refused
        piece = None if refused else self.take(pages)
        self.refused = refused
        return piece

    def has(self, generation: int) -> bool:
        """Whether this record is kept. Doesn't count as a use."""
        return generation in self._probation or generation in self._protected

    def look_again(self) -> None:
        """Retry refused allocations: uses that are not counted here end without notice."""
        self._free_what_went()
        if self.refused:
            self.refused = False
            self._freed()

    def _free_what_went(self) -> None:
        """Free forgotten pieces whose last outside use has ended."""
        going = list(self._going.items())
        for (generation, piece), may_go in zip(going, self._may_go([*self._going]), strict=True):
            if may_go:
                del self._going[generation]
                self.release(piece)

    def keep(self, piece: Piece, generation: int, name: Name | None = None) -> None:
        """Keep a piece as this record, so that later reads find it, unless the record is kept already."""
        if piece.generation or generation in self._probation or generation in self._protected:
            return
        if name is not None:
            self._named[name] = generation
            self._kept_of[name[0]] = self._kept_of.get(name[0], 0) + piece.pages
        piece.generation, piece.name, piece.wipes = generation, name, self._wipes
        self._probation[generation] = piece
        self._kept_pages += piece.pages

    def keep_all(self, pieces: Sequence[Piece], generations: Sequence[int], names: Sequence[Name]) -> None:
        """Keep pieces as new records of these names, each no longer used by its one user."""
        for piece, generation, name in zip(pieces, generations, names, strict=True):
            self.keep(piece, generation, name)
            self.release(piece)

    def find(self, generation: int) -> Piece | None:
        """Find this record's piece and add a user; a piece found again is protected from scans."""
        piece = self._protected.get(generation)
        if piece is not None:
            self._protected.move_to_end(generation)
        else:
            piece = self._probation.pop(generation, None)
            if piece is None:
                self._not_found += 1
                return None
            self._protected[generation] = piece
            self._protected_pages += piece.pages
            self._demote()
        self._found += 1
        piece.users += 1
        return piece

    def peek(self, generation: int) -> Piece | None:
        """The piece of this record. Doesn't count as a use."""
        return self._protected.get(generation) or self._probation.get(generation)

    def touch(self, generation: int) -> None:
        """Count a use of this record that needed no piece."""
        piece = self.find(generation)
        if piece is not None:
            self.release(piece)

    def wipe_free(self, page: int, pages_max: int) -> int | None:
        """Overwrite free pages from `page` on, at most `pages_max`; returns the page to continue at, None at the end.

        Pieces that are in use and not kept when a pass begins, at page 0, are overwritten when they are released: the
        block being read into them may have been erased meanwhile.
        """
        self._wipes += not page
        for start, pages in self._free.after(page):
            first = max(start, page)
            until = min(start + pages, self.used_until, first + pages_max)
            if first >= until:
                break
            self._wipe(first, until - first)
            page, pages_max = until, pages_max - (until - first)
            if not pages_max:
                self._unwiped = page
                return page
        self._unwiped = None
        return None

    def release(self, piece: Piece) -> None:
        """Remove one user. A piece without users that is not kept becomes free."""
        piece.users -= 1
        if not piece.users and not piece.generation:
            self._release_pages(piece)
        if not piece.users and self.refused:
            self.refused = False
            self._freed()

    def forget(self, piece: Piece) -> None:
        """Stop keeping a piece whose bytes are wrong."""
        if not piece.generation:
            return
        generation = self._no_longer_keep(piece)
        self.retire(piece, generation)
        if not piece.users:
            self._release_pages(piece)

    def _no_longer_keep(self, piece: Piece) -> int:
        """Forget which record a piece has; return its generation."""
        if self._protected.pop(piece.generation, None) is not None:
            self._protected_pages -= piece.pages
        else:
            del self._probation[piece.generation]
        self._kept_pages -= piece.pages
        generation, piece.generation, piece.wipes = piece.generation, 0, self._wipes
        if piece.name is not None:
            self._no_longer_kept(piece.name, generation, piece.pages)
        return generation

    def _wipe_if_due(self, piece: Piece) -> None:
        if piece.is_erased or piece.wipes != self._wipes:
            self._wipe(piece.start, piece.pages)

    def _release_pages(self, piece: Piece) -> None:
        self._wipe_if_due(piece)
        self._free.release(piece.start, piece.pages)

    def retire(self, piece: Piece, known_as: int) -> None:
        """End the uses of a piece that is not kept, and was known by this number."""
        if not self._may_go([known_as])[0]:
            piece.users += 1
            self._going[known_as] = piece

    def drop_dead(self, names: Iterable[Name], lookup: Lookup, *, are_erased: bool = False) -> None:
        """Drop the pieces kept under these names, unless the index still names their records."""
        kept = [name for name in names if name in self._named]
        if not kept:
            return
        for name, entry in zip(kept, lookup(kept), strict=True):
            generation = self._named.get(name, 0)
            piece = self.peek(generation)
            if piece is not None and (entry is None or entry.generation != generation):
                piece.is_erased = are_erased
                self.forget(
                    piece
                )  # a piece in use is freed, and waiters are woken, when its last user is done

    def statistics(self) -> HotStatistics:
        """The current counts."""
        return HotStatistics(
            capacity_bytes=self._pages * PAGE_BYTES,
            kept_bytes=self._kept_pages * PAGE_BYTES,
            protected_bytes=self._protected_pages * PAGE_BYTES,
            kept=len(self._probation) + len(self._protected),
            found=self._found,
            not_found=self._not_found,
            evicted=self._evicted,
        )

    def _demote(self) -> None:
        while self._protected_pages > self._protected_pages_max:
            generation, piece = self._protected.popitem(last=False)
            self._protected_pages -= piece.pages
            self._probation[generation] = piece

    def _no_longer_kept(self, name: Name, generation: int, pages: int) -> None:
        if self._named.get(name) == generation:
            del self._named[name]
        left = self._kept_of.pop(name[0]) - pages
        if left:
            self._kept_of[name[0]] = left

    def _evict_one(self, tenant: Hashable) -> bool:
        for spared in (self._is_for_certain, lambda *_: False):
            for kept in (self._probation, self._protected):
                stay: list[int] = []
                gone: Piece | None = None
                for generation, piece in kept.items():
                    if spared(piece, tenant):
                        stay.append(generation)
                    elif not piece.users and self._may_go([generation])[0]:
                        gone = piece
                        break
                for generation in stay:  # so that they are not examined each time
                    kept.move_to_end(generation)
                if gone is not None:
                    self._evicted += 1
                    self.forget(gone)
                    return True
        return False

    def _is_for_certain(self, piece: Piece, tenant: Hashable) -> bool:
        """Whether to spare a piece: it is in the guaranteed part of a tenant other than the reading one."""
        tenants = self._tenants()
        if tenants <= 1 or piece.name is None or piece.name[0] == tenant:
            return False
        return self._kept_of[piece.name[0]] - piece.pages < self._pages // (2 * tenants)


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
        self.pages = HotPages(size_bytes // PAGE_BYTES, freed, self.shelf.take, tenants, self._wipe)
        self.shares = Shares(size_bytes, tenants)
        self.view = memoryview(self._memory)
        self._expected: dict[Name, int] = {}  # generations being read, if the index has named them throughout

    def take(self, length_bytes: int, tenant: Hashable) -> Piece | None:
        """Allocate a piece for a tenant's record with a payload of this length."""
        return self.pages.take(pages_of(length_bytes), tenant)

    def address(self, piece: Piece) -> int:
        """The address of a piece's header page in this process."""
        return self.region.address + piece.start * PAGE_BYTES

    def payload(self, piece: Piece, length_bytes: int) -> memoryview:
        """A view of the payload in a piece."""
        start = piece.start * PAGE_BYTES + HEADER_BYTES
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
                self.pages.keep(piece, generation, name)
                kept.append((*name, entry))
        self.shelve(kept)

    def expect(self, name: Name, generation: int) -> None:
        """Note that a read of this record, which the index names now, has begun."""
        self._expected[name] = generation

    def came(self, found: Iterable[tuple[Piece | None, Name, Entry | None]]) -> None:
        """Keep records that were read and sent, if the index has named them since `expect`, and shelve them."""
        kept = []
        for piece, name, entry in found:
            if entry is None or piece is None or self._expected.get(name) != entry.generation:
                continue
            del self._expected[name]
            self.pages.keep(piece, entry.generation, name)
            kept.append((*name, entry))
        self.shelve(kept)

    def expect_no_more(self, name: Name) -> None:
        """Note that the read failed."""
        self._expected.pop(name, None)

    def changed(
        self, names: Sequence[Name], lookup: Lookup, *, are_new: bool, are_erased: bool = False
    ) -> None:
        """Unlist and drop the blocks of these names: the index has other entries for them now, or none.

        New blocks that landed by a grant stay listed: the index can only have their own records. The core knows the
        places of new blocks already (`cold_calls`), so that a get in between finds one or the other.
        """
        self.unlist(names, are_new=are_new)
        for name in names if self._expected else ():
            self._expected.pop(name, None)
        self.pages.drop_dead(names, lookup, are_erased=are_erased)

    def unlist(self, names: Iterable[Name], *, are_new: bool = False) -> None:
        """Stop the C core from sending these; it may send new blocks of these names that land later."""
        self.shelf.unlist(b"".join(map(b"".join, names)), others_only=are_new)

    def stored(self, names: Iterable[Name]) -> None:
        """Note that these names are stored, so that later puts of them are compared with the stored block."""
        self.shelf.stored(b"".join(map(b"".join, names)), are_stored=True)

    def gone(self, names: Iterable[Name]) -> None:
        """Note that these names are no longer stored."""
        self.shelf.stored(b"".join(map(b"".join, names)), are_stored=False)

    def _wipe(self, start: int, pages: int) -> None:
        ctypes.memset(self.region.address + start * PAGE_BYTES, 0, pages * PAGE_BYTES)

    def close(self) -> None:
        """Free the memory. The fabric must be closed already."""
        self.view.release()
        self._memory.close()
        os.close(self.fd)
