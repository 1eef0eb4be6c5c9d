"""The slots of an open keyring: what each contains, look-up by name, and writes.

What always holds: a slot's bytes in the file decide; memory (30 bytes a slot) only says where to look. Only free slots
are taken and, once the keyring can't grow, those whose key was destroyed, the oldest first; a damaged one is never
taken until an erasure has overwritten it. A slot that was moved, or changed since it was loaded, or is all zeros, is
damaged: free ones are marked before the keyring counts them.
What it doesn't do: know a key, or order writes: its caller syncs.

One thread writes at a time; the others may read meanwhile.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import Corrupt, InvalidArgument, NoSpace, QuotaExceeded
from kvstore.limits import (
    KEYRING_LOAD_PAGES,
    KEYRING_NEW_NAMES_MAX,
    KEYRING_ROTATED_AT_ONCE,
    KEYRING_SLOTS_MAX,
    KEYRING_STEP_PAGES_MAX,
    KEYRING_STEP_PAGES_MIN,
    KEYRING_TENANT_KEYS_MAX,
    TENANT_BYTES,
)
from kvstore.names import domain_tag
from kvstore.sealing.domain_key import Erased
from kvstore.sealing.slot_check import Some
from kvstore.sealing.slots import (
    DOMAIN_BYTES,
    HEADER_PAGES,
    SLOT_BYTES,
    SLOTS_PER_PAGE,
    Kind,
    State,
    pack_slot,
    parse_slot,
)
from nic_offload import wrapped_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.sealing.keyring_file import KeyringFile
    from kvstore.sealing.slot_check import Good
    from kvstore.sealing.slots import Slot

__all__ = ["SlotTable", "marked"]

FREE: Final = 0
LIVE: Final = 1
GONE: Final = 2
DAMAGED: Final = 3

_ROW: Final = np.dtype(
    [
        ("state", "<u4"),
        ("kind", "<u4"),
        ("id", "<u8"),
        ("name", "<u8", (4,)),
        ("when", "<u8"),
        ("by", "<u8"),
        ("sealed", "V60"),
        ("crc", "<u4"),
    ]
)
_U64: Final = (1 << 64) - 1
_WORD_BYTES: Final = 8

assert _ROW.itemsize == SLOT_BYTES

_Rows = Any  # a structured array


class SlotTable:
    """All slots of a keyring."""

    def __init__(
        self,
        file: KeyringFile,
        slots: int,
        *,
        slots_max: int = KEYRING_SLOTS_MAX,
        grown: Callable[[int], object] = lambda _: None,
        are_marked: bool = True,
    ) -> None:
        """Load this many slots; `grown` records, durably, that there are more. Unless `are_marked`, zeros are free."""
        self.file = file
        self._grown = grown
        self._are_marked = are_marked
        self._lock = Lock()  # for the state in memory; never held during I/O
        self._slots_max = slots_max
        self._mixing = [int(one) | 1 for one in np.frombuffer(np.random.default_rng().bytes(24), "<u8")]
        pages = HEADER_PAGES + slots // SLOTS_PER_PAGE
        self._versions: NDArray[np.uint32] = np.zeros(pages, np.uint32)  # number of writes of each page
        self._under_way: dict[int, bytes] = {}  # old contents of pages being written
        self._states: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._ids: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._sorted: NDArray[np.uint64] = np.zeros(0, np.uint64)  # hashes of tenants and domains' tags, and
        self._order: NDArray[np.uint32] = np.zeros(0, np.uint32)  # the slots with them
        self._new: dict[bytes, list[int]] = {}  # slots by tenant and tag, written since the last sort
        self._live_of: Counter[int] = Counter()  # live domain keys by the tenant's first 8 bytes
        self._vacant: list[int] = []  # free, or with a destroyed key without a name; the next one at the end
        self._oldest_gone: list[int] = []  # taken when no other is left; the next one at the end
        self.others: list[int] = []  # loaded slots of keys other than domains'
        self._moved: dict[int, int] = {}  # slots of intact keys in wrong slots, by key id
        self._met: set[int] = set()  # slots found damaged after the opening
        self._load(pages)

    def _load(self, pages: int) -> None:
        states, ids, mixed, numbers = [], [], [], []
        for first, rows, raw in self._chunks(pages):
            state = _states_of(rows, raw)
            states.append(state)
            ids.append(rows["id"].copy())
            used = (state == LIVE) | (state == GONE)
            named = np.flatnonzero(used & (rows["kind"] == Kind.DOMAIN))
            mixed.append(self._mix(_tagged(rows["name"][named])))
            live = rows["name"][:, 0][(state == LIVE) & (rows["kind"] == Kind.DOMAIN)]
            tenants, counts = np.unique(live, return_counts=True)
            self._live_of.update(dict(zip(tenants.tolist(), counts.tolist(), strict=True)))
            numbers.append((named + first).astype(np.uint32))
            of_keys = used & np.isin(rows["kind"], (Kind.STORE, Kind.TENANT))
            self.others += (np.flatnonzero(of_keys) + first).tolist()
        if states:
            self._states, self._ids = np.concatenate(states), np.concatenate(ids)
            names, where = np.concatenate(mixed), np.concatenate(numbers)
            order = np.argsort(names, kind="stable")
            self._sorted, self._order = names[order], where[order]
        nameless = (self._states == GONE) & (self._ids == 0)
        self._vacant = np.flatnonzero((self._states == FREE) | nameless)[::-1].tolist()

    def _chunks(self, pages: int) -> Iterator[tuple[int, _Rows, bytes]]:
        """Yield the number of the first slot, the slots, and their bytes, thousands at a time."""
        for page in range(HEADER_PAGES, pages, KEYRING_LOAD_PAGES):
            raw = self.file.read(page, min(KEYRING_LOAD_PAGES, pages - page))
            if not self._are_marked:
                raw = marked(raw)
            yield (page - HEADER_PAGES) * SLOTS_PER_PAGE, np.frombuffer(raw, _ROW), raw

    def _mix(self, tagged: NDArray[np.uint64]) -> NDArray[np.uint64]:
        mixed = np.zeros(len(tagged), np.uint64)
        for word, factor in enumerate(self._mixing):
            mixed += tagged[:, word] * np.uint64(factor)
        return mixed

    @property
    def _pages(self) -> int:
        """The number of pages of the header and the known slots."""
        return HEADER_PAGES + len(self._states) // SLOTS_PER_PAGE

    def __len__(self) -> int:
        return len(self._states)

    def counts(self) -> tuple[int, int, int, int]:
        """How many are free, live, gone and damaged."""
        free, live, gone, damaged = np.bincount(self._states, minlength=4)[:4].tolist()
        return free, live, gone, damaged

    def damaged(self) -> list[int]:
        """Slots whose keys can't be opened."""
        with self._lock:
            numbers: list[int] = np.flatnonzero(self._states == DAMAGED).tolist()
        return numbers

    def read(self, number: int) -> Slot | None:
        """The contents of a slot, None if it is free; Corrupt if it is damaged, which is noted."""
        try:
            return parse_slot(self.row(number))
        except Corrupt:
            self.mark_damaged([number])
            raise

    def row(self, number: int) -> bytes:
        """A slot's bytes."""
        page = self._page(HEADER_PAGES + number // SLOTS_PER_PAGE)
        at = number % SLOTS_PER_PAGE * SLOT_BYTES
        return page[at : at + SLOT_BYTES]

    def mark_damaged(self, numbers: Sequence[int], *, ids: Sequence[int] = (), met: bool = True) -> None:
        """Note that slots are damaged, and the ids of intact keys in them; `met`: since the keyring was opened."""
        with self._lock:
            for number in numbers:
                if self._states[number] != DAMAGED and met:
                    self._met.add(number)
                self._states[number] = DAMAGED
            self._moved.update((one, number) for one, number in zip(ids, numbers, strict=False) if one)

    def check(self, judge: Callable[[bytes, Some], Good], *, met: bool) -> None:
        """Mark slots as damaged that have changed since they were loaded, or contain another slot's domain key.

        `judge` returns which keys are authentic, given the id of the key that wraps them, and their slots.
        """
        for first, rows, raw in self._chunks(self._pages):
            known, ids = self._states[first : first + len(rows)], self._ids[first : first + len(rows)]
            states = _states_of(rows, raw)
            bad = (known != DAMAGED) & ((states != known) | ((states != FREE) & (rows["id"] != ids)))
            judged = np.flatnonzero((states == LIVE) & ~bad & (known == LIVE) & (rows["kind"] == Kind.DOMAIN))
            for by, some in _apart(judged, rows["by"][judged]):
                bad[some] = ~judge(by.to_bytes(8, "little"), Some(raw, some, some + first))
            found = np.flatnonzero(bad)
            whole = [int(rows["id"][one]) if states[one] == LIVE else 0 for one in found]
            self.mark_damaged((found + first).tolist(), ids=whole, met=met)

    def expect(self, numbers: NDArray[np.int64]) -> int:
        """Mark as damaged those of these slots that are free, because records name them; returns how many."""
        there = numbers[numbers < len(self._states)]
        lost = there[self._states[there] == FREE].tolist()
        self.mark_damaged(lost, met=False)
        return len(lost)

    def is_lost(self, number: int) -> bool:
        """Whether a slot has no bytes of any key."""
        return self.row(number) in (bytes(SLOT_BYTES), pack_slot(None))

    def have_changed(self) -> bool:
        """Whether the file's contents of any slot, except damaged ones, differ from what is known."""
        for first, rows, raw in self._chunks(self._pages):
            known, ids = self._states[first : first + len(rows)], self._ids[first : first + len(rows)]
            states = _states_of(rows, raw)
            if ((known != DAMAGED) & ((states != known) | ((states != FREE) & (rows["id"] != ids)))).any():
                return True
        return False

    def is_moved(self, key_id: bytes) -> bool:
        """Whether a key is in another slot than its own."""
        return int.from_bytes(key_id, "little") in self._moved

    def was_met(self, number: int) -> bool:
        """Whether a damaged slot was intact when the keyring was opened."""
        return number in self._met

    def tenant_of(self, number: int) -> bytes | None:
        """The tenant of a slot that was intact before; None if its name was damaged too."""
        (one,) = np.frombuffer(self.row(number), _ROW)
        return one["name"].tobytes()[:TENANT_BYTES] if int(one["id"]) == int(self._ids[number]) else None

    def id_of(self, number: int) -> bytes:
        """The last known id of a slot's key."""
        return int(self._ids[number]).to_bytes(8, "little")

    def _page(self, page: int) -> bytes:
        """A page as it was before or after a write, never a mixture."""
        while True:
            with self._lock:
                known = self._under_way.get(page)
                version = int(self._versions[page])
            data = self.file.read(page, 1) if known is None else known
            with self._lock:
                if known is not None or int(self._versions[page]) == version:
                    return data

    def is_live(self, number: int, key_id: bytes) -> bool:
        """Whether a slot has the live key of this id."""
        with self._lock:
            if not 0 <= number < len(self._states) or self._states[number] != LIVE:
                return False
            return int(self._ids[number]) == int.from_bytes(key_id, "little")

    def is_damaged(self, number: int) -> bool:
        """Whether a slot was found damaged, and not overwritten since."""
        with self._lock:
            return 0 <= number < len(self._states) and int(self._states[number]) == DAMAGED

    def was_destroyed(self, number: int) -> bool:
        """Whether a slot once had a key that it doesn't have now: only destruction removes a key from its slot.

        A free slot never had one, as far as this keyring knows.
        """
        with self._lock:
            return 0 <= number < len(self._states) and self._states[number] in (LIVE, GONE)

    def is_gone(self, number: int) -> bool:
        """Whether the last key of a slot was destroyed."""
        return 0 <= number < len(self._states) and self._states[number] == GONE

    def has_id(self, number: int, key_id: bytes) -> bool:
        """Whether a slot has, or had last, the key of this id."""
        return int(self._ids[number]) == int.from_bytes(key_id, "little")

    def find_all(self, tenant: bytes, domain: bytes) -> list[tuple[int, Slot]]:
        """All intact slots of a domain: more than one if a damaged one was restored."""
        found = self._whole(self.numbers_of(tenant, domain))
        return [one for one in found if (one[1].tenant, one[1].domain) == (tenant, domain)]

    def tagged(self, tenant: bytes, tag: bytes) -> list[tuple[int, Slot]]:
        """All intact slots of a tenant's domains with this tag."""
        found = self._whole(self._numbers_of(tenant, tag))
        return [one for one in found if (one[1].tenant, domain_tag(one[1].domain)) == (tenant, tag)]

    def _whole(self, numbers: Iterable[int]) -> Iterator[tuple[int, Slot]]:
        """Yield those of these slots that have, or had, a domain's key."""
        for one in numbers:
            if self._states[one] in (LIVE, GONE):
                with suppress(Corrupt):
                    slot = self.read(one)
                    if slot is not None and slot.kind == Kind.DOMAIN:
                        yield one, slot

    def numbers_of(self, tenant: bytes, domain: bytes) -> list[int]:
        """The slots that may have this name, according to memory."""
        if (len(tenant), len(domain)) != (TENANT_BYTES, DOMAIN_BYTES):
            raise InvalidArgument(f"A tenant and a domain have {TENANT_BYTES} and {DOMAIN_BYTES} bytes.")
        return self._numbers_of(tenant, domain_tag(domain))

    def _numbers_of(self, tenant: bytes, tag: bytes) -> list[int]:
        name = _named(tenant, tag)
        with self._lock:
            new = list(self._new.get(name, ()))
        return list(dict.fromkeys([*new, *self._sorted_in(name)]))

    def _sorted_in(self, name: bytes) -> list[int]:
        words = (
            int.from_bytes(name[at : at + _WORD_BYTES], "little") for at in range(0, len(name), _WORD_BYTES)
        )
        mixed = sum(word * factor for word, factor in zip(words, self._mixing, strict=True)) & _U64
        with self._lock:
            ordered, order = self._sorted, self._order
        first = int(np.searchsorted(ordered, np.uint64(mixed), "left"))
        last = int(np.searchsorted(ordered, np.uint64(mixed), "right"))
        return [int(one) for one in order[first:last]]

    def check_room(self, count: int, kept: int) -> None:
        """NoSpace unless this many slots can be taken while those of erased tenants are kept."""
        growing = max(self._slots_max - len(self._states), 0)
        gone = int(np.count_nonzero((self._states == GONE) & (self._ids != 0))) - kept
        if count > len(self._vacant) + growing + gone:
            raise NoSpace(f"The keyring has {self._slots_max} keys, which is its maximum.")

    def check_tenants(self, names: Iterable[tuple[bytes, bytes]]) -> None:
        """QuotaExceeded if one key for each of these domains would exceed a tenant's maximum."""
        for tenant, count in Counter(_tenant_word(tenant) for tenant, _ in names).items():
            if self._live_of[tenant] + count > KEYRING_TENANT_KEYS_MAX:
                raise QuotaExceeded(
                    f"The tenant has {self._live_of[tenant]:,} erase domains, and its maximum is"
                    f" {KEYRING_TENANT_KEYS_MAX:,}: erase users who are gone."
                )

    def take(self, taken: Collection[int] = ()) -> int:
        """Take a slot to be written, other than those already taken."""
        if not self._vacant and len(self._states) < self._slots_max:
            self._grow()
        while self._vacant:
            number = self._vacant.pop()
            if self._states[number] == FREE or (self._states[number] == GONE and not self._ids[number]):
                return number
        if not self._oldest_gone:
            self._look_for_gone(taken)
        while self._oldest_gone:
            number = self._oldest_gone.pop()
            if self._states[number] == GONE and number not in taken:
                return number
        raise NoSpace(f"The keyring has {self._slots_max} keys, which is its maximum.")

    def give_back(self, number: int) -> None:
        """Note that a slot was freed, or that its key without a name was destroyed."""
        self._vacant.append(number)

    def _grow(self) -> None:
        had = len(self._states)
        pages = min(max(KEYRING_STEP_PAGES_MIN, had // SLOTS_PER_PAGE), KEYRING_STEP_PAGES_MAX)
        pages = min(pages, -(-(self._slots_max - had) // SLOTS_PER_PAGE))
        more = pages * SLOTS_PER_PAGE
        self.file.write(HEADER_PAGES + had // SLOTS_PER_PAGE, pack_slot(None) * more)
        self.file.sync()
        self._grown(had + more)
        with self._lock:
            self._states = np.concatenate([self._states, np.zeros(more, np.uint8)])
            self._ids = np.concatenate([self._ids, np.zeros(more, np.uint64)])
            self._versions = np.concatenate([self._versions, np.zeros(pages, np.uint32)])
        self._vacant += range(had + more - 1, had - 1, -1)

    def _look_for_gone(self, taken: Collection[int]) -> None:
        found: list[tuple[int, int]] = []
        for first, rows, _ in self._chunks(self._pages):
            gone = np.flatnonzero(
                (self._states[first : first + len(rows)] == GONE) & (rows["kind"] == Kind.DOMAIN)
            )
            gone = gone[~np.isin(gone + first, list(taken))]
            found += zip(rows["when"][gone].tolist(), (gone + first).tolist(), strict=True)
            found = sorted(found)[:KEYRING_ROTATED_AT_ONCE]
        self._oldest_gone = [number for _, number in reversed(found)]

    def gone_with(self, tenant: Slot) -> list[Erased]:
        """The domains' keys that were destroyed together with their tenant's."""
        low, high = (np.uint64(int.from_bytes(tenant.tenant[at : at + 8], "little")) for at in (0, 8))
        found: list[Erased] = []
        for first, rows, _ in self._chunks(self._pages):
            of = (self._states[first : first + len(rows)] == GONE) & (rows["kind"] == Kind.DOMAIN)
            of &= (rows["name"][:, 0] == low) & (rows["name"][:, 1] == high)
            for at in np.flatnonzero(of & (rows["when"] == np.uint64(tenant.when_ms))).tolist():
                domain, key_id = rows["name"][at].tobytes()[TENANT_BYTES:], rows["id"][at].tobytes()
                one = Erased(tenant.tenant, domain, first + at, key_id, tenant.when_ms, is_earlier=True)
                found.append(one)
        return found

    def write(self, changes: Mapping[int, Slot | None]) -> None:
        """Overwrite slots in place; the caller makes this durable (sync) and known to readers (`publish`)."""
        pages: dict[int, tuple[bytes, bytearray]] = {}
        for number, slot in sorted(changes.items()):
            page = HEADER_PAGES + number // SLOTS_PER_PAGE
            if page not in pages:
                old = self.file.read(page, 1)
                pages[page] = old, bytearray(old)
            at = number % SLOTS_PER_PAGE * SLOT_BYTES
            pages[page][1][at : at + SLOT_BYTES] = pack_slot(slot)
        for page, (old, data) in pages.items():
            with self._lock:
                self._under_way[page] = old
                self._versions[page] += 1
            try:
                self.file.write(page, bytes(data))
            finally:
                with self._lock:
                    del self._under_way[page]

    def publish(self, changes: Mapping[int, Slot | None]) -> None:
        """Make changed slots visible to readers."""
        with self._lock:
            self._met.difference_update(changes)
            self._moved = {one: where for one, where in self._moved.items() if where not in changes}
            for number, slot in changes.items():
                if slot is not None and slot.kind == Kind.DOMAIN:
                    was = int(self._states[number]) == LIVE
                    self._live_of[_tenant_word(slot.tenant)] += (slot.state == State.LIVE) - was
                self._ids[number] = 0 if slot is None else int.from_bytes(slot.id, "little")
                self._states[number] = FREE if slot is None else LIVE if slot.state == State.LIVE else GONE
                if slot is not None and slot.kind == Kind.DOMAIN:
                    same = self._new.setdefault(_named(slot.tenant, domain_tag(slot.domain)), [])
                    if number not in same:
                        same.append(number)
        if len(self._new) > KEYRING_NEW_NAMES_MAX:
            self._sort_in()

    def _sort_in(self) -> None:
        """Merge the dictionary's names into the sorted ones. The lock is held only to replace these."""
        pairs = [(name, number) for name, numbers in self._new.items() for number in numbers]
        names = np.frombuffer(b"".join(name for name, _ in pairs), "<u8").reshape(-1, len(self._mixing))
        numbers = np.array([number for _, number in pairs], np.uint32)
        kept = np.isin(self._order, numbers, invert=True)  # these may have had other names
        mixed = np.concatenate([self._sorted[kept], self._mix(names)])
        numbers = np.concatenate([self._order[kept], numbers])
        order = np.argsort(mixed, kind="stable")
        with self._lock:
            self._sorted, self._order = mixed[order], numbers[order]
            self._new = {}

    def live_where(self, tenant: bytes | None = None, wrapped_by: bytes | None = None) -> Iterator[list[int]]:
        """Yield the slots of live domain keys of a tenant, wrapped by a key (each if given), some at a time."""
        for first, rows, _ in self._chunks(self._pages):
            of = (self._states[first : first + len(rows)] == LIVE) & (rows["kind"] == Kind.DOMAIN)
            if tenant is not None:
                low, high = (np.uint64(int.from_bytes(tenant[at : at + 8], "little")) for at in (0, 8))
                of &= (rows["name"][:, 0] == low) & (rows["name"][:, 1] == high)
            if wrapped_by is not None:
                of &= rows["by"] == np.uint64(int.from_bytes(wrapped_by, "little"))
            found = (np.flatnonzero(of) + first).tolist()
            for at in range(0, len(found), KEYRING_ROTATED_AT_ONCE):
                yield found[at : at + KEYRING_ROTATED_AT_ONCE]


def _named(tenant: bytes, tag: bytes) -> bytes:
    """The name by which slots are found."""
    return tenant + tag.ljust(_WORD_BYTES, b"\0")


def _tagged(names: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same for many slots, from tenants and domains: three words each."""
    tenants, domains = names[:, :2], np.ascontiguousarray(names[:, 2:])
    tags = np.frombuffer(wrapped_keys.domain_tags(domains.tobytes()), "<u8")
    return np.column_stack([tenants, tags])


def _tenant_word(tenant: bytes) -> int:
    return int.from_bytes(tenant[:8], "little")


def _apart(some: NDArray[np.intp], by: NDArray[np.uint64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Group slots by the key that wraps theirs."""
    order = np.argsort(by, kind="stable")
    if len(some):
        ends = np.flatnonzero(np.diff(by[order])) + 1
        for group in np.split(order, ends):
            yield int(by[group[0]]), some[group]


def _states_of(rows: _Rows, raw: bytes) -> NDArray[np.uint8]:
    """Return the states of slots; all are checked, so damaged ones are found."""
    whole = np.frombuffer(wrapped_keys.are_whole(raw), np.bool_)
    states = np.full(len(rows), DAMAGED, np.uint8)
    for state, of in ((LIVE, State.LIVE), (GONE, State.GONE), (FREE, State.FREE)):
        states[whole & (rows["state"] == of) & np.isin(rows["kind"], tuple(Kind))] = state
    return states


def marked(raw: bytes) -> bytes:
    """The bytes of slots, with the mark of free ones instead of zeros."""
    rows = np.frombuffer(raw, np.uint8).reshape(-1, SLOT_BYTES).copy()
    rows[~rows.any(axis=1)] = np.frombuffer(pack_slot(None), np.uint8)
    return rows.tobytes()
