"""Which pages of the hot memory hold which records: the Python face of `kvstore/storage/keep/hot.c`.

What always holds is said in `hot.h`. A `Piece` is the number of a run of pages; it is valid until its last user has
released it, or while it is kept.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NewType

import numpy as np

from kvstore.limits import PAGE_BYTES
from kvstore.storage.index_layout import NAME_BYTES
from kvstore.storage.keep._keep import ffi, lib
from kvstore.storage.keep.outcome import check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["ROOM", "HotPages", "HotStatistics", "Piece", "Uses"]

Piece = NewType("Piece", int)
"""A run of pages."""
ROOM = np.dtype([("address", "<u8"), ("pages", "<u4"), ("number", "<u4")])
"""A piece of memory that is given away in advance: `struct keep_room`, and `tk_room`; its number is its piece."""

assert ROOM.itemsize == ffi.sizeof("struct keep_room")


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


class Uses:
    """Uses of pieces that aren't counted by `HotPages`: a C function that ends them (`struct keep_uses`)."""

    def __init__(self, function: int, first: int, are_over: Callable[[], bool]) -> None:
        """`first` is its first argument; it is not called once all uses `are_over`."""
        self._uses = ffi.new("struct keep_uses *")
        self._uses.end = ffi.cast("void (*)(void *, const uint64_t *, int, uint8_t *)", function)
        self._uses.self = ffi.cast("void *", first)
        self._are_over = are_over

    def get(self) -> Any:
        """Return what the C functions take."""
        return ffi.NULL if self._are_over() else self._uses


class HotPages:
    """The pages of a memory. It touches only what is overwritten, and does no I/O."""

    def __init__(
        self,
        pages: int,
        freed: Callable[[], object],
        uses: Uses | None = None,
        tenants: Callable[[], int] = lambda: 1,
        address: int = 0,
    ) -> None:
        """`freed` is called when a piece is released after one was refused.

        `tenants` returns how many tenants the node knows. `address` is where the memory begins; 0: there is none.
        """
        self._pages = pages
        self._freed = freed
        self._uses = uses
        self._tenants = tenants
        self._owners: dict[bytes, int] = {b"": 0}  # numbers of tenants, 0 is nobody's
        self._owners_made = 1
        self._idle_owners: list[int] = []  # numbers that nobody has
        hot = lib.keep_hot_new(pages, ffi.cast("char *", address), secrets.token_bytes(16))
        if not hot:
            raise MemoryError("There is no memory for the table of the hot memory.")
        self._hot = ffi.gc(hot, lib.keep_hot_free)

    # Pieces.

    def take(self, pages: int, tenant: bytes = b"") -> Piece | None:
        """Allocate a piece for a tenant's read, with one user; None if everything evictable is in use."""
        piece = lib.keep_hot_take(self._hot, pages, self._owner(tenant), self._tenants(), self._ends())
        return None if piece == lib.KEEP_NONE else Piece(check(piece))

    def take_many(self, pages: int, most: int) -> NDArray[Any]:
        """Allocate pieces that nobody has requested, as `ROOM`s; none while requested reads wait for memory."""
        most = max(0, most)
        rooms = np.empty(most, ROOM)
        out = ffi.from_buffer("struct keep_room[]", rooms, require_writable=True)
        count = lib.keep_hot_take_many(self._hot, pages, most, self._tenants(), self._ends(), out)
        return rooms[:count]

    def take_unasked(self, pages: int) -> Piece | None:
        """Allocate a piece that nobody has requested."""
        rooms = self.take_many(pages, 1)
        return Piece(int(rooms["number"][0])) if len(rooms) else None

    def use(self, piece: Piece) -> None:
        """Add a user."""
        lib.keep_hot_use(self._hot, piece)

    def release(self, piece: Piece) -> None:
        """Remove one user. A piece without users that is not kept becomes free."""
        self.release_all([piece])

    def release_all(self, pieces: Sequence[Piece] | NDArray[np.uint32]) -> None:
        """Remove one user of each."""
        if lib.keep_hot_release(self._hot, _pieces(pieces), len(pieces)):
            self._freed()

    def start(self, piece: Piece) -> int:
        """Return its first page."""
        return int(lib.keep_hot_start(self._hot, piece))

    def pages(self, piece: Piece) -> int:
        """Return how many pages it has."""
        return int(lib.keep_hot_pages(self._hot, piece))

    def size(self, pieces: Sequence[Piece] | NDArray[np.uint32]) -> int:
        """Return the bytes of all these pieces."""
        return int(lib.keep_hot_sum(self._hot, _pieces(pieces), len(pieces))) * PAGE_BYTES

    def users(self, piece: Piece) -> int:
        """Return how many users it has."""
        return int(lib.keep_hot_users(self._hot, piece))

    @property
    def refused(self) -> bool:
        """Return whether a read was refused memory and has not been told yet that there may be some."""
        return bool(lib.keep_hot_has_refused(self._hot))

    def look_again(self) -> None:
        """Retry refused allocations: uses that are not counted here end without notice."""
        if lib.keep_hot_look_again(self._hot, self._ends()):
            self._freed()

    # Records.

    def keep(self, piece: Piece, generation: int, tenant: bytes = b"", key: bytes = b"") -> None:
        """Keep a piece as this record, so that later reads find it, unless the record is kept already.

        Without a tenant and a key it is found by its generation alone.
        """
        self.keep_all([piece], [generation], tenant + key if tenant else None, tenant)

    def keep_all(
        self,
        pieces: Sequence[Piece] | NDArray[np.uint32],
        generations: Sequence[int] | NDArray[np.uint64],
        names: bytes | None,
        tenant: bytes,
    ) -> None:
        """Keep pieces as records of one tenant; `names` has tenant and key of each."""
        named = ffi.NULL if names is None else ffi.from_buffer("uint8_t[]", names)
        lib.keep_hot_keep(
            self._hot, _pieces(pieces), _numbers(generations), named, len(pieces), self._owner(tenant)
        )

    def generation(self, piece: Piece) -> int:
        """Return the generation of the record that it is kept as; 0: it is not kept."""
        return int(lib.keep_hot_generation(self._hot, piece))

    def has(self, generation: int) -> bool:
        """Whether this record is kept. Doesn't count as a use."""
        return self.peek(generation) is not None

    def find(self, generation: int) -> Piece | None:
        """Find this record's piece and add a user; a piece found again is protected from scans."""
        piece = lib.keep_hot_find(self._hot, generation)
        return None if piece < 0 else Piece(piece)

    def peek(self, generation: int) -> Piece | None:
        """The piece of this record. Doesn't count as a use."""
        piece = lib.keep_hot_peek(self._hot, generation)
        return None if piece < 0 else Piece(piece)

    def touch(self, generations: Sequence[int]) -> None:
        """Count a use of each of these records that needed no piece."""
        lib.keep_hot_touch(self._hot, _numbers(generations), len(generations))

    def forget(self, piece: Piece) -> None:
        """Stop keeping a piece whose bytes are wrong."""
        lib.keep_hot_forget(self._hot, piece, self._ends())

    def drop(self, generations: Sequence[int] | NDArray[np.uint64]) -> None:
        """Stop keeping records that have left the index."""
        lib.keep_hot_drop(self._hot, _numbers(generations), len(generations), self._ends())

    def replace(self, names: bytes, generations: NDArray[np.uint64]) -> None:
        """Stop keeping records whose names other records have now."""
        lib.keep_hot_replace(
            self._hot,
            ffi.from_buffer("uint8_t[]", names),
            _numbers(generations),
            len(generations),
            self._ends(),
        )

    def erase(self, names: bytes) -> None:
        """Stop keeping the records of these names; their pieces are overwritten as soon as nobody uses them."""
        count = len(names) // NAME_BYTES
        lib.keep_hot_erase(self._hot, ffi.from_buffer("uint8_t[]", names), count, self._ends())

    def retire(self, piece: Piece, known_as: int) -> None:
        """End the uses of a piece that is not kept, and was known by this number."""
        lib.keep_hot_retire(self._hot, piece, known_as, self._ends())

    def wipe_free(self, page: int, pages_max: int) -> int | None:
        """Overwrite free pages from `page` on, at most `pages_max`; returns the page to continue at, None at the end.

        Pieces that are in use and not kept when a pass begins, at page 0, are overwritten when they are released: the
        block being read into them may have been erased meanwhile.
        """
        page = lib.keep_hot_wipe_free(self._hot, page, pages_max)
        return None if page == lib.KEEP_NONE else page

    def kept_pages_of(self, tenant: bytes) -> int:
        """Return how many pages a tenant keeps."""
        return self._owned(self._owners.get(tenant, 0))

    def statistics(self) -> HotStatistics:
        """The current counts."""
        said = ffi.new("struct keep_hot_said *")
        lib.keep_hot_say(self._hot, said)
        return HotStatistics(
            capacity_bytes=self._pages * PAGE_BYTES,
            kept_bytes=said.kept_pages * PAGE_BYTES,
            protected_bytes=said.protected_pages * PAGE_BYTES,
            kept=said.kept,
            found=said.found,
            not_found=said.not_found,
            evicted=said.evicted,
        )

    def _owner(self, tenant: bytes) -> int:
        owner = self._owners.get(tenant)
        if owner is None:
            if not self._idle_owners:
                self._add_owners()
            owner = self._owners[tenant] = self._idle_owners.pop()
        return owner

    def _add_owners(self) -> None:
        """Find a number for another tenant: of one that keeps nothing now, or a new one."""
        idle = [tenant for tenant, owner in self._owners.items() if owner and not self._owned(owner)]
        if len(idle) > self._owners_made // 2:
            self._idle_owners = [self._owners.pop(tenant) for tenant in idle]
            return
        more = range(self._owners_made, 2 * self._owners_made)
        check(lib.keep_hot_owners(self._hot, more.stop))
        self._owners_made = more.stop
        self._idle_owners = list(reversed(more))

    def _owned(self, owner: int) -> int:
        return int(lib.keep_hot_owned_pages(self._hot, owner))

    def _ends(self) -> Any:
        return ffi.NULL if self._uses is None else self._uses.get()


def _pieces(pieces: Sequence[Piece] | NDArray[np.uint32]) -> Any:
    return ffi.from_buffer("uint32_t[]", np.ascontiguousarray(pieces, np.uint32))


def _numbers(generations: Iterable[int] | NDArray[np.uint64]) -> Any:
    return ffi.from_buffer("uint64_t[]", np.ascontiguousarray(generations, np.uint64))
