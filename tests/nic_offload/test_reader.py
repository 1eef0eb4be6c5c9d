"""Readers: from a drive into a peer's memory, checked on the way, with no call of the application in between."""

from __future__ import annotations

import errno
import fcntl
import os
from collections import Counter
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nic_offload._core import ffi

from nic_offload.checksum import crc32c_at
from nic_offload.errors import FabricError
from nic_offload.fabric import EventKind
from nic_offload.lane import Lane
from nic_offload.reader import Reader, Reading
from tests.nic_offload.rig import PAGE, Pair, wait_until
from tests.nic_offload.test_lane import FIXED, FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nic_offload.fabric import Fabric

MIB = 1 << 20
BATCH = 77
LENGTH = 3 * PAGE + 123
RECORD_BYTES = 5 * PAGE
OFFSET, GENERATION, EXPIRES_MS = 16 * PAGE, 4711, 0
KEY, OWNER, FINGERPRINT = b"k" * 32, b"o" * 16, b"f" * 16
FLAG = 9
NO_DESCRIPTOR = 1 << 30
DEPTH = 4


def payload_of(number: int, length: int = LENGTH) -> bytes:
    return bytes((number + at * 7) % 251 for at in range(length))


def crc(data: bytearray) -> int:
    pinned = ffi.from_buffer(data)
    return crc32c_at(int(ffi.cast("uintptr_t", pinned)), len(data))


def header_of(
    offset: int,
    generation: int,
    payload: bytes,
    expires_ms: int = EXPIRES_MS,
    key: bytes = KEY,
    owner: bytes = OWNER,
) -> bytes:
    fixed = FIXED.pack(
        FORMAT.magic,
        FORMAT.version,
        FORMAT.kind,
        len(payload),
        key,
        owner,
        FINGERPRINT,
        generation,
        expires_ms,
        crc(bytearray(payload)),
    )
    tag = blake2b(
        FORMAT.name + offset.to_bytes(8, "little") + fixed, key=FORMAT.secret, digest_size=16
    ).digest()
    return fixed + tag


def record_of(
    offset: int,
    generation: int,
    payload: bytes,
    expires_ms: int = EXPIRES_MS,
    key: bytes = KEY,
    owner: bytes = OWNER,
) -> bytearray:
    data = bytearray(PAGE + -(-len(payload) // PAGE) * PAGE)
    header = header_of(offset, generation, payload, expires_ms, key, owner)
    data[: len(header)] = header
    data[PAGE : PAGE + len(payload)] = payload
    return data


class Drive:
    """A file with records, and the reader of a pair's near side."""

    def __init__(self, pair: Pair, path: Path) -> None:
        self.pair = pair
        self.path = path
        path.write_bytes(bytes(4 * MIB))
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.reader = Reader(pair.near.fabric, self._fd, DEPTH, FORMAT)

    def write(self, offset: int, data: bytes | bytearray) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def reading(self, tag: int = 1, payload: bytes | None = None, **fields: Any) -> Reading:
        payload = payload_of(1) if payload is None else payload
        there, near = self.pair.there, self.pair.near
        at: dict[str, Any] = {
            "tag": tag,
            "endpoint": near.endpoint.pointer,
            "peer": there.peer,
            "address": near.region.address,
            "target": there.base,
            "target_key": there.key,
            "flag_target": there.word_target(0),
            "flag_key": there.key,
            "flag_value": FLAG,
            "offset": OFFSET,
            "generation": GENERATION,
            "length": len(payload),
            "crc32c": crc(bytearray(payload)),
            "skip": 0,
            "part": 0,
        }
        return Reading(**({"shares": 0} | at | fields), key=KEY, owner=OWNER, fingerprint=FINGERPRINT)

    def put(self, *readings: Reading, batch: int = BATCH) -> None:
        self.reader.put(self.pair.near.region, batch, readings)

    def wait_over(self, batch: int = BATCH) -> None:
        near = self.pair.near
        near.wait(lambda: len(near.kinds(batch)) == 2, "the batch is over")
        assert sorted(near.kinds(batch)) == [EventKind.SENT, EventKind.READ]

    def wait_end(self, tag: int = 1, batch: int = BATCH) -> tuple[EventKind, int]:
        """Wait for a batch's end; only failed puts have events of their own."""
        near = self.pair.near
        near.wait(lambda: EventKind.SENT in near.kinds(batch), "the end of the puts")
        failures = near.of(tag)
        assert len(failures) < 2
        return (EventKind.FAILED, failures[0].status) if failures else (EventKind.SENT, 0)

    def is_untouched(self) -> bool:
        """Nothing has arrived after a fence."""
        self.pair.there.fence()
        far = self.pair.far
        return far.word(0).load() == 0 and not any(far.bytes_at(0, RECORD_BYTES))

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def drive(pair: Pair, tmp_path: Path) -> Iterator[Drive]:
    one = Drive(pair, tmp_path / "drive")
    yield one
    one.close()


class Large(Drive):
    """Records that take many reads, with random bytes; the requested part is sent to its place in the target."""

    KIB = (16 << 10, 3 << 10, 700, 256, 257, 4, 9 << 10)  # more than is read at a time, in ends of all kinds

    def __init__(self, pair: Pair, path: Path) -> None:
        self.pair = pair
        self.path = path
        self.payloads = [os.urandom((kib << 10) - at) for at, kib in enumerate(self.KIB)]
        self.offsets = [PAGE]
        for payload in self.payloads:
            self.offsets.append(self.offsets[-1] + PAGE + -(-len(payload) // PAGE) * PAGE)
        path.write_bytes(bytes(self.offsets[-1]))
        for at, payload in enumerate(self.payloads):
            self.write(self.offsets[at], record_of(self.offsets[at], GENERATION + at, payload))
        self._fd = os.open(path, os.O_RDONLY)
        self.reader = Reader(pair.near.fabric, self._fd, DEPTH, FORMAT)

    def forget(self, at: int) -> None:
        """Drop the pages from the kernel's cache."""
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_NORMAL)
        os.posix_fadvise(self._fd, self.offsets[at], 64 * PAGE, os.POSIX_FADV_DONTNEED)

    def put_all(self) -> None:
        there, near = self.pair.there, self.pair.near
        self.put(
            *(
                self.reading(
                    at + 1,
                    payload,
                    address=near.region.address + self.offsets[at] - PAGE,
                    target=there.base + self.offsets[at],
                    flag_target=there.word_target(at),
                    offset=self.offsets[at],
                    generation=GENERATION + at,
                )
                for at, payload in enumerate(self.payloads)
            )
        )

    def came(self, at: int) -> bool:
        """Whether a block has arrived: all of its bytes are there, or none, as the flag says."""
        payload, far = self.payloads[at], self.pair.far
        if far.word(at).load() == FLAG:
            assert far.bytes_at(self.offsets[at], len(payload)) == payload
            return True
        assert not any(far.bytes_at(self.offsets[at], len(payload)))
        return False


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Large]:
    with Pair("net", length=32 * MIB) as pair:
        one = Large(pair, tmp_path / "drive")
        yield one
        one.close()


class Slow(Drive):
    """A drive whose bytes arrive when the test writes them: a pipe."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._fd, self._writer = os.pipe()
        fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, 1 << 18)
        self.reader = Reader(pair.near.fabric, self._fd, DEPTH, FORMAT)

    def give(self, data: bytes | bytearray) -> None:
        assert os.write(self._writer, data) == len(data)

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._fd)


@pytest.fixture
def slow() -> Iterator[Slow]:
    with Pair("net") as pair:
        one = Slow(pair)
        yield one
        one.close()  # the reads end, and so the fabric can


def test_a_record_goes_from_the_drive_to_the_peer_followed_by_its_flag(drive: Drive) -> None:
    drive.write(OFFSET, record_of(OFFSET, GENERATION, payload_of(1)))
    drive.put(drive.reading())
    assert drive.wait_end() == (EventKind.SENT, 0)
    drive.wait_over()
    far = drive.pair.far
    wait_until(lambda: far.word(0).load() == FLAG, "the flag")
    assert far.bytes_at(0, LENGTH) == payload_of(1)
    assert not any(far.bytes_at(LENGTH, PAGE))


def test_the_whole_is_checked_and_only_the_part_put(drive: Drive) -> None:
    drive.write(OFFSET, record_of(OFFSET, GENERATION, payload_of(1)))
    drive.put(drive.reading(skip=100, part=50))
    assert drive.wait_end() == (EventKind.SENT, 0)
    wait_until(lambda: drive.pair.far.word(0).load() == FLAG, "the flag")
    assert drive.pair.far.bytes_at(0, 60) == payload_of(1)[100:150] + bytes(10)
    damaged = record_of(OFFSET, GENERATION, payload_of(1))
    damaged[PAGE + LENGTH - 1] ^= 1
    drive.write(OFFSET, damaged)
    drive.put(drive.reading(tag=2, skip=100, part=50), batch=78)
    assert drive.wait_end(2, 78) == (EventKind.FAILED, -errno.EBADMSG)


def test_a_changed_expiry_is_still_the_same_record(drive: Drive) -> None:
    drive.write(OFFSET, record_of(OFFSET, GENERATION, payload_of(1), expires_ms=1 << 40))
    drive.put(drive.reading())
    assert drive.wait_end() == (EventKind.SENT, 0)


@pytest.mark.parametrize("at", [PAGE, PAGE + LENGTH // 2, PAGE + LENGTH - 1])
def test_a_flipped_bit_of_the_payload_is_not_sent(drive: Drive, at: int) -> None:
    record = record_of(OFFSET, GENERATION, payload_of(1))
    record[at] ^= 0x10
    drive.write(OFFSET, record)
    drive.put(drive.reading())
    assert drive.wait_end() == (EventKind.FAILED, -errno.EBADMSG)
    drive.wait_over()
    assert drive.is_untouched()


@pytest.mark.parametrize("at", [0, 8, 10, 12, 16, 48, 64, 80, 88, 96, 100, 104, 119])
def test_a_flipped_bit_of_the_header_is_not_sent(drive: Drive, at: int) -> None:
    """Magic, version, kind, length, key, owner, fingerprint, generation, expiry, CRC, zeros, and its tag."""
    record = record_of(OFFSET, GENERATION, payload_of(1))
    record[at] ^= 1
    drive.write(OFFSET, record)
    drive.put(drive.reading())
    assert drive.wait_end() == (EventKind.FAILED, -errno.ENODATA)
    drive.wait_over()
    assert drive.is_untouched()


def test_another_record_is_not_sent_in_its_place(drive: Drive) -> None:
    """Its extent holds another one: of a later generation, or moved here from another place."""
    drive.write(OFFSET, record_of(OFFSET, GENERATION + 1, payload_of(1)))
    drive.put(drive.reading(tag=1), batch=71)
    assert drive.wait_end(1, 71) == (EventKind.FAILED, -errno.ENODATA)
    drive.write(OFFSET, record_of(OFFSET + PAGE, GENERATION, payload_of(1)))
    drive.put(drive.reading(tag=2), batch=72)
    assert drive.wait_end(2, 72) == (EventKind.FAILED, -errno.ENODATA)
    drive.write(OFFSET, bytes(RECORD_BYTES))
    drive.put(drive.reading(tag=3), batch=73)
    assert drive.wait_end(3, 73) == (EventKind.FAILED, -errno.ENODATA)
    assert drive.is_untouched()


def test_places_beyond_the_end_of_the_drive_are_not_read(drive: Drive) -> None:
    drive.write(4 * MIB - 2 * PAGE, record_of(4 * MIB - 2 * PAGE, GENERATION, payload_of(1))[: 2 * PAGE])
    drive.put(drive.reading(tag=1, offset=4 * MIB - 2 * PAGE), drive.reading(tag=2, offset=8 * MIB))
    assert {drive.wait_end(tag) for tag in (1, 2)} == {(EventKind.FAILED, -errno.ENODATA)}
    drive.wait_over()
    assert drive.is_untouched()


def test_more_reads_than_run_at_a_time_complete_and_their_batch_ends_once(drive: Drive) -> None:
    records = 4 * DEPTH
    for number in range(records):
        offset = OFFSET + number * RECORD_BYTES
        drive.write(offset, record_of(offset, GENERATION + number, payload_of(number)))
    address, there = drive.pair.near.region.address, drive.pair.there
    drive.put(
        *(
            drive.reading(
                number + 1,
                payload_of(number),
                address=address + number * RECORD_BYTES,
                target=there.base + number * LENGTH,
                flag_target=there.word_target(number),
                offset=OFFSET + number * RECORD_BYTES,
                generation=GENERATION + number,
            )
            for number in range(records)
        )
    )
    assert {drive.wait_end(number + 1) for number in range(records)} == {(EventKind.SENT, 0)}
    drive.wait_over()
    drive.pair.there.fence()
    for number in range(records):
        assert drive.pair.far.bytes_at(number * LENGTH, LENGTH) == payload_of(number)


@pytest.mark.parametrize("forgotten", [None, 0, 1])
def test_large_records_are_read_in_pieces_and_arrive_whole(large: Large, forgotten: int | None) -> None:
    """In whatever order the pieces arrive: those that the kernel has cached are first."""
    if forgotten is not None:
        large.forget(forgotten)
    large.put_all()
    large.wait_over()
    large.pair.there.fence()
    assert not [at for at in range(len(large.payloads)) if large.wait_end(at + 1) != (EventKind.SENT, 0)]
    assert all(large.came(at) for at in range(len(large.payloads)))


def test_a_damaged_large_record_delays_no_other(large: Large) -> None:
    offset, length = large.offsets[0], len(large.payloads[0])
    large.write(offset + length // 2, b"another")
    large.write(large.offsets[1], b"no header")
    large.put_all()
    large.wait_over()
    large.pair.there.fence()
    assert large.wait_end(1) == (EventKind.FAILED, -errno.EBADMSG)
    assert large.wait_end(2) == (EventKind.FAILED, -errno.ENODATA)
    assert [large.came(at) for at in range(len(large.payloads))] == [False, False] + 5 * [True]


def test_a_large_record_is_cancelled_while_it_is_read(large: Large) -> None:
    large.put_all()
    cancelled = large.pair.near.fabric.cancel([1, 3])
    large.wait_over()
    large.pair.there.fence()
    ends = [large.wait_end(at + 1) for at in range(len(large.payloads))]
    assert ends.count((EventKind.FAILED, -errno.ECANCELED)) == cancelled
    assert [large.came(at) for at in range(len(ends))] == [end[0] is EventKind.SENT for end in ends]


def ring_descriptors() -> Counter[str]:
    """The number of this process's io_uring descriptors and eventfds."""
    found = Counter[str]()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found[str(fd.readlink())] += 1
    return Counter({name: found[name] for name in ("anon_inode:[io_uring]", "anon_inode:[eventfd]")})


@pytest.mark.parametrize(
    "opens",
    [
        pytest.param(lambda fabric, fd: Reader(fabric, fd, DEPTH, FORMAT), id="reader"),
        pytest.param(lambda fabric, fd: Lane(fabric, 1, fd, DEPTH, MIB, FORMAT), id="lane"),
    ],
)
def test_opening_on_a_closed_descriptor_fails_and_leaks_no_descriptor(
    opens: Callable[[Fabric, int], object],
) -> None:
    with Pair("net") as pair:
        before = ring_descriptors()
        with pytest.raises(FabricError, match="Bad file descriptor"):
            opens(pair.near.fabric, NO_DESCRIPTOR)
        assert ring_descriptors() <= before


def test_memory_outside_the_region_is_refused(drive: Drive) -> None:
    near = drive.pair.near
    end = near.region.address + near.region.length
    wrongs: tuple[dict[str, int], ...] = (
        {"address": end - RECORD_BYTES + PAGE},
        {"address": near.region.address + 8},
        {"address": near.region.address - PAGE},
        {"offset": OFFSET + 512},
        {"length": 0},
        {"skip": LENGTH, "part": 1},
    )
    for wrong in wrongs:
        with pytest.raises(FabricError):
            drive.put(drive.reading(**dict[str, Any](wrong)))
    assert near.region._is_idle()


def test_a_cancelled_put_ends_at_once_and_its_extent_when_the_drive_is_done(slow: Slow) -> None:
    near = slow.pair.near
    slow.put(slow.reading())
    slow.pair.there.fence()
    assert near.fabric.cancel([1]) == 1
    assert slow.wait_end() == (EventKind.FAILED, -errno.ECANCELED)
    assert near.kinds(BATCH) == [EventKind.SENT]
    assert not near.region._is_idle()
    slow.give(record_of(OFFSET, GENERATION, payload_of(1)))
    slow.wait_over()
    assert near.region._is_idle()
    assert slow.is_untouched()


def test_pages_of_a_closed_endpoint_are_reported_too(slow: Slow) -> None:
    near = slow.pair.near
    slow.put(slow.reading())
    slow.pair.there.fence()
    near.endpoint.close()
    near.reap()
    assert not near.of(1)
    assert near.kinds(BATCH) == [EventKind.SENT], "it is over, and its memory is not free"
    assert not near.region._is_idle()
    slow.give(record_of(OFFSET, GENERATION, payload_of(1)))
    slow.wait_over()
    assert near.region._is_idle()
    assert not any(slow.pair.far.bytes_at(0, LENGTH))
    assert slow.pair.far.word(0).load() == 0


def test_a_queued_read_that_is_cancelled_is_never_made(slow: Slow) -> None:
    near = slow.pair.near
    slow.put(*(slow.reading(tag) for tag in range(1, DEPTH + 1)), batch=100)
    slow.pair.there.fence()
    slow.put(slow.reading(50), batch=101)
    assert near.fabric.cancel([50]) == 1
    assert slow.wait_end(50, 101) == (EventKind.FAILED, -errno.ECANCELED)
    for _ in range(DEPTH):
        slow.give(record_of(OFFSET, GENERATION, payload_of(1)))
    slow.wait_over(100)
    slow.wait_over(101)  # and nobody has written what it would have read


def test_chunks_of_a_message_are_joined(slow: Slow) -> None:
    record = bytes(record_of(OFFSET, GENERATION, payload_of(1)))
    slow.put(slow.reading())
    for at in range(0, len(record), PAGE):
        slow.pair.there.fence()
        slow.give(record[at : at + PAGE])
    assert slow.wait_end() == (EventKind.SENT, 0)
    slow.wait_over()


def test_a_piece_that_is_not_whole_sectors_is_an_error(slow: Slow) -> None:
    slow.put(slow.reading())
    slow.give(bytes(record_of(OFFSET, GENERATION, payload_of(1)))[:700])
    assert slow.wait_end() == (EventKind.FAILED, -errno.ENODATA)
    slow.wait_over()
    assert slow.is_untouched()
