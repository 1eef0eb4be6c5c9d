"""The hot memory's pages: allocation, protection and eviction order."""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from kvstore.storage.keep._keep import ffi

from kvstore.limits import KEY_BYTES, PAGE_BYTES, TENANT_BYTES
from kvstore.node.hot_pages import HotPages, Piece, Uses

if TYPE_CHECKING:
    from collections.abc import Callable, Container

GOOD, EVIL = b"good".ljust(TENANT_BYTES), b"evil".ljust(TENANT_BYTES)


class Sent:
    """Pieces that are being sent, by generation; their uses are not counted."""

    def __init__(self, sending: Container[int] | Callable[[], bool]) -> None:
        """Blocks of a container count as being sent, or all blocks while a function returns true."""

        def ended(_: object, numbers: ffi.CData, count: int, out: ffi.CData) -> None:
            for at in range(count):
                out[at] = not sending() if callable(sending) else numbers[at] not in sending

        self._function = ffi.callback("void(void *, const uint64_t *, int, uint8_t *)", ended)
        self.uses = Uses(int(ffi.cast("uintptr_t", self._function)), 0, lambda: self.uses is None)


class Memory:
    """Memory in which no byte is zero until it is overwritten."""

    def __init__(self, pages: int) -> None:
        self.bytes = bytearray(b"x" * PAGE_BYTES * pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    @property
    def wiped(self) -> list[int]:
        pages = range(0, len(self.bytes), PAGE_BYTES)
        return [at // PAGE_BYTES for at in pages if not any(self.bytes[at : at + PAGE_BYTES])]


def key_of(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES)


def read(hot: HotPages, generation: int, pages: int = 1) -> Piece:
    """Read a record into hot memory, as a fetch does that didn't find it there."""
    piece = hot.take(pages)
    assert piece is not None
    hot.keep(piece, generation)
    hot.release(piece)
    return piece


def wants(hot: HotPages, generation: int) -> bool:
    """Whether a fetch would find the record in hot memory."""
    piece = hot.find(generation)
    if piece is not None:
        hot.release(piece)
    return piece is not None


def pages_of_size(pages: int) -> HotPages:
    return HotPages(pages, lambda: None)


def test_a_record_is_found_only_under_its_generation() -> None:
    hot = pages_of_size(8)
    piece = read(hot, 7)
    found = hot.find(7)
    assert found == piece
    assert hot.find(8) is None
    statistics = hot.statistics()
    assert (statistics.found, statistics.not_found, statistics.kept) == (1, 1, 1)
    assert statistics.kept_bytes == statistics.protected_bytes == PAGE_BYTES


def test_a_piece_in_use_is_never_reallocated() -> None:
    hot = pages_of_size(4)
    used = hot.take(3)
    assert used is not None
    hot.keep(used, 1)
    assert hot.take(2) is None
    again = hot.find(1)
    assert again == used
    hot.release(used)
    assert hot.take(2) is None, "its second user is not done"
    hot.release(used)
    assert hot.take(2) is not None
    assert hot.find(1) is None


def test_a_refused_caller_retries_when_an_unreported_use_ends() -> None:
    """A client on this machine that reads a block is done with it, or has held it for too long."""
    told: list[int] = []
    reading = True
    hot = HotPages(4, lambda: told.append(1), Sent(lambda: reading).uses)
    read(hot, 7, 4)
    assert hot.take(2) is None
    hot.look_again()
    assert told == [1]
    assert hot.take(2) is None
    reading = False
    hot.look_again()
    assert told == [1, 1]
    assert hot.take(2) is not None
    hot.look_again()
    assert told == [1, 1], "nobody waits"


def test_a_caller_without_a_request_delays_no_other() -> None:
    freed = []
    hot = HotPages(4, lambda: freed.append(True))
    used = hot.take(3)
    assert used is not None
    assert hot.take_unasked(2) is None
    assert not hot.refused, "fetches go on"
    one = hot.take_unasked(1)
    assert one is not None
    hot.release(one)
    assert hot.take(2) is None
    assert hot.take_unasked(1) is None, "that room is for who was refused"
    assert hot.refused
    hot.release(used)
    assert freed == [True]


def test_checking_whether_a_record_is_cached_is_not_a_use() -> None:
    hot = pages_of_size(4)
    read(hot, 1)
    before = hot.statistics()
    assert hot.has(1)
    assert not hot.has(2)
    assert hot.statistics() == before


def test_the_oldest_record_that_was_requested_once_is_evicted_first() -> None:
    hot = pages_of_size(4)
    for generation in (1, 2, 3, 4):
        read(hot, generation)
    assert wants(hot, 1)
    read(hot, 5)
    assert [wants(hot, generation) for generation in (1, 2, 3, 4, 5)] == [True, False, True, True, True]


def test_a_scan_does_not_evict_records_that_were_requested_again() -> None:
    hot = pages_of_size(10)
    for generation in (1, 2, 3):
        read(hot, generation)
        assert wants(hot, generation)
    for generation in range(100, 400):
        read(hot, generation)
    assert all(wants(hot, generation) for generation in (1, 2, 3))


def test_the_protected_part_leaves_room_for_new_records() -> None:
    hot = pages_of_size(10)
    for generation in range(10):
        read(hot, generation + 1)
        assert wants(hot, generation + 1)
        assert hot.statistics().protected_bytes <= 8 * PAGE_BYTES
    read(hot, 100, pages=2)
    assert wants(hot, 100)


def test_a_record_read_twice_at_once_is_cached_once() -> None:
    hot = pages_of_size(4)
    first, second = hot.take(2), hot.take(2)
    assert first is not None
    assert second is not None
    hot.keep(first, 9)
    hot.keep(second, 9)
    hot.release(first)
    hot.release(second)
    told = hot.statistics()
    assert (told.kept, told.kept_bytes, told.protected_bytes, told.found) == (
        1,
        2 * PAGE_BYTES,
        2 * PAGE_BYTES,
        0,
    )
    assert hot.find(9) == first
    assert hot.take(2) is not None, "the second one's pages are free"


def test_a_forgotten_piece_is_not_found_and_is_free_after_its_last_use() -> None:
    hot = pages_of_size(2)
    piece = hot.take(2)
    assert piece is not None
    hot.keep(piece, 5)
    hot.forget(piece)
    assert hot.find(5) is None
    assert hot.take(1) is None
    hot.release(piece)
    assert hot.take(2) is not None


def test_a_refused_caller_is_called_back_when_there_may_be_room() -> None:
    called: list[int] = []
    hot = HotPages(2, lambda: called.append(1))
    first = hot.take(1)
    second = hot.take(1)
    assert first is not None
    assert second is not None
    hot.keep(first, 1)
    assert hot.take(1) is None
    assert hot.refused
    assert not called
    hot.release(first)
    assert called == [1]
    assert not hot.refused
    hot.release(second)
    assert called == [1]


def overlap(hot: HotPages, one: Piece, other: Piece) -> bool:
    first, second = hot.start(one), hot.start(other)
    return first < second + hot.pages(other) and second < first + hot.pages(one)


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_never_allocated_twice_and_never_lost(seed: int) -> None:
    rng = random.Random(seed)
    total = 64
    hot = pages_of_size(total)
    used: list[Piece] = []
    owner: dict[int, Piece] = {}
    records = 0
    for _ in range(3000):
        match rng.randrange(4):
            case 0:
                piece = hot.take(rng.randrange(1, 9))
                if piece is not None:
                    assert piece not in used
                    assert not any(overlap(hot, piece, other) for other in used), (
                        "pages in use were given away"
                    )
                    if rng.random() < 0.8:
                        records += 1
                        hot.keep(piece, records)
                        owner[records] = piece
                    used.append(piece)
            case 1 if used:
                hot.release(used.pop(rng.randrange(len(used))))
            case 2 if records:
                generation = rng.randrange(1, records + 1)
                piece = hot.find(generation)
                if piece is not None:
                    assert piece == owner[generation]
                    used.append(piece)
            case 3 if used and rng.random() < 0.1:
                hot.forget(used[rng.randrange(len(used))])
    hot.release_all(used)
    assert hot.take(total) is not None, "all pages can be had again"


def test_a_piece_in_use_is_not_evicted_and_a_forgotten_one_stays_until_its_last_use() -> None:
    """The shelf sends pieces that no fetch of ours holds."""
    sending: set[int] = set()
    hot = HotPages(4, lambda: None, Sent(sending).uses)
    first, second = read(hot, 1, 2), read(hot, 2, 2)
    sending.add(1)
    piece = hot.take(2)
    assert piece is not None
    assert hot.start(piece) == 2, "that of the other one, though it was read later"
    assert piece == second, "and its number"
    assert hot.peek(1) == first
    assert hot.take(2) is None
    hot.forget(first)
    assert not wants(hot, 1)
    assert hot.take(2) is None, "its bytes are on their way"
    sending.clear()
    again = hot.take(2)
    assert again is not None
    assert hot.start(again) == 0


def test_use_that_needed_no_piece_counts_as_use() -> None:
    hot = pages_of_size(4)
    for generation in (1, 2, 3, 4):
        read(hot, generation)
    hot.touch([1, 9])
    assert hot.peek(1) is not None
    for generation in (5, 6, 7):
        read(hot, generation)
    assert wants(hot, 1)
    assert not wants(hot, 2)


def reads(hot: HotPages, tenant: bytes, generations: range, times: int = 1) -> None:
    """Fetch blocks of a tenant, each this many times."""
    for generation in generations:
        if not wants(hot, generation):
            piece = hot.take(1, tenant)
            assert piece is not None
            hot.keep(piece, generation, tenant, key_of(generation))
            hot.release(piece)
        for _ in range(times - 1):
            assert wants(hot, generation)


@pytest.mark.parametrize("wanted", [1, 2], ids=["scanned", "wanted again"])
def test_reads_of_one_tenant_leave_another_its_share(wanted: int) -> None:
    hot = HotPages(80, lambda: None, tenants=lambda: 2)
    reads(hot, GOOD, range(1, 31))
    for first in range(1000, 3000, 100):
        reads(hot, EVIL, range(first, first + 100), wanted)
    kept = [generation for generation in range(1, 31) if hot.has(generation)]
    assert len(kept) == 20, "a quarter, which is its half of one half"
    assert [hot.kept_pages_of(tenant) for tenant in (GOOD, EVIL)] == [20, 60]


def test_a_tenants_reads_replace_its_own_pieces_and_a_single_tenant_has_no_share() -> None:
    hot = HotPages(80, lambda: None, tenants=lambda: 2)
    reads(hot, GOOD, range(1, 21))
    reads(hot, EVIL, range(100, 160))
    reads(hot, GOOD, range(21, 41))
    assert [hot.has(generation) for generation in (1, 20, 21, 40)] == [False, False, True, True]
    alone = HotPages(80, lambda: None)
    reads(alone, GOOD, range(1, 21))
    reads(alone, EVIL, range(100, 180))
    assert not any(alone.has(generation) for generation in range(1, 21))


def test_a_block_that_needs_nearly_all_memory_gets_it_despite_scattered_pieces() -> None:
    """No read may wait for idle pieces: nothing would wake it."""
    hot = HotPages(80, lambda: None, tenants=lambda: 2)
    for first in range(0, 80, 8):
        reads(hot, GOOD, range(first + 1, first + 3))
        reads(hot, EVIL, range(first + 101, first + 107))
    room = hot.take(3, b"")
    assert room is not None
    assert hot.take(70, EVIL) is not None
    assert not hot.refused


def test_an_erased_block_is_overwritten_after_its_last_user() -> None:
    memory = Memory(8)
    hot = HotPages(8, lambda: None, address=memory.address)
    pieces = []
    for number in (1, 2, 3):
        piece = hot.take(2)
        assert piece is not None
        hot.keep(piece, number, GOOD, key_of(number))
        pieces.append(piece)
    hot.release(pieces[0])
    hot.release(pieces[2])
    hot.erase(b"".join(GOOD + key_of(number) for number in (1, 2, 9)))
    assert memory.wiped == [0, 1], "the other one is in use"
    hot.release(pieces[1])
    assert memory.wiped == [0, 1, 2, 3]
    hot.drop([3])
    assert memory.wiped == [0, 1, 2, 3], "it was not erased"
    assert hot.statistics().kept == 0


def test_a_record_is_dropped_when_another_one_takes_its_name() -> None:
    hot = pages_of_size(8)
    for number in (1, 2):
        piece = hot.take(2)
        assert piece is not None
        hot.keep(piece, number, GOOD, key_of(number))
        hot.release(piece)
    hot.replace(b"".join(GOOD + key_of(number) for number in (1, 2)), np.array([1, 7], np.uint64))
    assert hot.has(1), "it is the index's still"
    assert not hot.has(2)


def test_each_record_of_a_large_batch_has_its_own_name() -> None:
    hot = HotPages(400, lambda: None)
    pieces = hot.take_many(2, 100)["number"]
    names = [GOOD + key_of(number) for number in range(100)]
    hot.keep_all(pieces, np.arange(1, 101, dtype=np.uint64), b"".join(names), GOOD)
    hot.release_all(pieces)
    newer = np.array([number + 1 + 1000 * (number % 3 == 0) for number in range(100)], np.uint64)
    hot.replace(b"".join(names), newer)
    assert [hot.has(number + 1) for number in range(100)] == [number % 3 != 0 for number in range(100)]
    hot.erase(names[98])
    assert not hot.has(99)


def test_the_last_record_cached_under_a_name_wins() -> None:
    """Both are cached for a moment: the index names one, and a read of the other began before."""
    hot = pages_of_size(8)
    for generation in (5, 6):
        piece = hot.take(2)
        assert piece is not None
        hot.keep(piece, generation, GOOD, key_of(1))
        hot.release(piece)
    hot.erase(GOOD + key_of(1))
    assert (hot.has(5), hot.has(6)) == (True, False)
    hot.erase(GOOD + key_of(1))
    assert hot.has(5)
    hot.drop([5])
    assert hot.kept_pages_of(GOOD) == 0


def test_tenants_without_cached_records_are_forgotten() -> None:
    """A node without tokens knows as many tenants as its callers make up."""
    hot = pages_of_size(64)
    for number in range(1000):
        tenant = number.to_bytes(TENANT_BYTES)
        piece = hot.take(4, tenant)
        assert piece is not None
        hot.keep(piece, number + 1, tenant, key_of(number))
        hot.release(piece)
        assert hot.kept_pages_of(tenant) == 4
    assert len(hot._owners) <= 64
    assert sum(hot.kept_pages_of(number.to_bytes(TENANT_BYTES)) for number in range(1000)) == 64


def test_exactly_the_bytes_of_evicted_blocks_are_overwritten_in_steps() -> None:
    memory = Memory(16)
    hot = HotPages(16, lambda: None, address=memory.address)
    pieces = [hot.take(2) for _ in range(6)]
    for at in (0, 2, 3, 5):
        piece = pieces[at]
        assert piece is not None
        hot.release(piece)
    page: int | None = 0
    steps = 0
    while page is not None:
        page = hot.wipe_free(page, 3)
        steps += 1
    assert memory.wiped == [0, 1, 4, 5, 6, 7, 10, 11], "the last four were never used"
    assert steps > 2


def test_pages_allocated_ahead_of_a_pass_over_free_pages_are_overwritten_at_once() -> None:
    memory = Memory(16)
    hot = HotPages(16, lambda: None, address=memory.address)
    pieces = [hot.take(2) for _ in range(8)]
    for at in (0, 4, 5):
        piece = pieces[at]
        assert piece is not None
        hot.release(piece)
    assert hot.wipe_free(0, 2) == 2
    piece = hot.take(4)
    assert piece is not None
    assert hot.start(piece) == 8
    assert memory.wiped == [0, 1, 8, 9, 10, 11]


def test_a_block_read_while_it_is_erased_is_overwritten_after_the_read() -> None:
    memory = Memory(8)
    hot = HotPages(8, lambda: None, address=memory.address)
    erased, kept, dropped, older = (hot.take(2) for _ in range(4))
    assert older is not None
    hot.keep(older, 1, GOOD, key_of(3))
    hot.release(older)
    assert erased is not None
    assert kept is not None
    assert dropped is not None
    hot.keep(dropped, 3, GOOD, key_of(2))
    hot.drop([3])  # deleted while it is in use
    assert hot.wipe_free(0, 8) is None
    assert not memory.wiped, "all of it is in use, or never was"
    hot.keep(kept, 2, GOOD, key_of(1))  # the index has it still
    hot.release(kept)
    hot.release(erased)
    hot.release(dropped)
    assert memory.wiped == [0, 1, 4, 5]
    hot.drop([2, 1])
    read(hot, 4, pages=2)
    assert memory.wiped == [0, 1, 4, 5], "what the index had is others', and so is what is read later"


def test_many_are_taken_at_once_from_the_oldest_of_their_size() -> None:
    memory, sent = Memory(12), Sent({4})
    hot = HotPages(12, lambda: None, sent.uses, address=memory.address)
    for generation in range(1, 7):
        piece = hot.take(2)
        assert piece is not None
        hot.keep(piece, generation, GOOD, key_of(generation))
        hot.release(piece)
    assert hot.find(1), "used again, so protected, and in use"
    rooms = hot.take_many(2, 3)
    pieces = [Piece(number) for number in rooms["number"].tolist()]
    assert rooms["pages"].tolist() == [2, 2, 2]
    places = [hot.start(piece) for piece in pieces]
    assert rooms["address"].tolist() == [memory.address + place * PAGE_BYTES for place in places]
    assert places == [2, 4, 8], "2, 3, and 5: 4 is being sent"
    assert [hot.has(generation) for generation in range(1, 7)] == [True, False, False, True, False, True]
    assert all(hot.users(piece) == 1 and not hot.generation(piece) for piece in pieces)
    assert hot.statistics().evicted == 3
    assert not memory.wiped
    assert [hot.start(piece) for piece in hot.take_many(2, 9)["number"].tolist()] == [10]
    assert not len(hot.take_many(2, 1))
    assert not len(hot.take_many(1, -1)), "of a client that holds more than it may"
    hot.release_all(pieces)
    evicted = hot.statistics().evicted
    again = [hot.start(piece) for piece in hot.take_many(2, 3)["number"].tolist()]
    assert sorted(again) == places
    assert hot.statistics().evicted == evicted, "free memory first"


def test_a_batch_does_not_take_the_guaranteed_share_of_a_tenant() -> None:
    hot = HotPages(80, lambda: None, tenants=lambda: 2)  # 20 pages are for certain
    for number in range(12):
        keep_named(hot, number, GOOD)
    for number in range(12, 40):
        keep_named(hot, number, EVIL)
    assert len(hot.take_many(2, 20)) == 20
    assert sum(hot.has(number + 1) for number in range(12)) == 10
    assert sum(hot.has(number + 1) for number in range(12, 40)) == 10
    assert len(hot.take_many(2, 40)) == 20, "and that only if nothing else is left"


def keep_named(hot: HotPages, generation: int, tenant: bytes) -> None:
    piece = hot.take(2, tenant)
    assert piece is not None
    hot.keep(piece, generation + 1, tenant, key_of(generation))
    hot.release(piece)
