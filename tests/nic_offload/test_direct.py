"""Gets without a call: what a client finds in the directory, what it must not find, and what the node learns."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from nic_offload.checksum import crc32c
from nic_offload.direct import BLOCKS_MAX, LOG_BYTES, DirectReads
from nic_offload.errors import FabricError
from nic_offload.fabric import MEMORY
from nic_offload.memory import address_of
from nic_offload.pieces import Pieces
from nic_offload.shelf import Desk, Served, Shelf, Shelved, directory_bytes
from tests.nic_offload.rig import PAGE, Pair, Side, wait_until
from tests.nic_offload.test_shelf import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

OWNER, FINGERPRINT = b"o" * 16, b"f" * 16
DESK = 77
BYTES_MAX = 2 << 20
METADATA = b"\x03\x02\x00\x00keyva\x00\x00\x00\x00\x00\x00\x00"
HEAD_BYTES, SLOT_BYTES = 4096, 128  # of the directory
SLOTS_MIN = 1024


def desk_of(pair: Pair, shelf: Shelf) -> Desk:
    return shelf.open_desk(
        pair.far.endpoint,
        pair.back.peer,
        OWNER,
        DESK,
        (pair.back.word_target(0), pair.back.key, PAGE // 8),
        (0x7F, 0x85),
        1 << 30,
        (pair.far.word(0).address, pair.back.base),
        shares=True,
    )


class DirectRig:
    """A node with a shelf, a directory and one desk, and the direct reads of that desk's client."""

    def __init__(self) -> None:
        self.pair = Pair(MEMORY)
        self.node: Side = self.pair.far
        self.shelf = Shelf(self.node.fabric, self.node.region)
        self.directory = mmap.mmap(-1, directory_bytes(SLOTS_MIN))
        self.shelf.share(self.directory)
        self.log = mmap.mmap(-1, LOG_BYTES)
        self.desk = desk_of(self.pair, self.shelf)
        self.desk.log(address_of(self.log))
        self.desk.answers(answers=True)
        self.direct = self.reads()
        self.target = bytearray(1 << 20)
        self.address = address_of(self.target)
        self.blocks: dict[int, bytes] = {}

    def reads(self, owner: bytes = OWNER) -> DirectReads:
        return DirectReads(self.directory, self.node.memory, address_of(self.log), owner)

    def shelve(self, number: int, data: bytes, *, at: int = 0, id: int | None = None) -> None:  # noqa: A002
        self.blocks[number] = data
        self.node.fill(at, data)
        address = self.node.region.address + at
        self.shelf.put(
            [
                Shelved(
                    OWNER,
                    key_of(number),
                    FINGERPRINT,
                    1000 + number if id is None else id,
                    address,
                    len(data),
                    crc32c(data),
                )
            ]
        )

    def unlist(self, number: int) -> None:
        self.shelf.unlist(OWNER + key_of(number))

    def read(
        self, *numbers: int, direct: DirectReads | None = None, fingerprint: bytes = FINGERPRINT
    ) -> bool:
        """Get whole blocks into adjacent memory; returns whether it worked, with exact bytes."""
        wanted, at = [], 0
        for number in numbers:
            length = len(self.blocks[number])
            wanted.append((key_of(number), length, 0, 0, self.address + at, 0))
            at += length
        before = self.target[at : at + 64]
        if (direct or self.direct).read(fingerprint, wanted, METADATA, BYTES_MAX) is None:
            return False
        assert self.target[:at] == b"".join([self.blocks[number] for number in numbers])
        assert self.target[at : at + 64] == before
        return True

    def served(self) -> list[Served]:
        return list(self.shelf.served())

    def close(self) -> None:
        self.direct.close()
        self.pair.close()


@pytest.fixture
def rig() -> Iterator[DirectRig]:
    with closing(DirectRig()) as one:
        yield one


def test_listed_blocks_are_read_and_reported(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(5000))
    rig.shelve(2, os.urandom(70_001), at=8192)
    before_ns = time.monotonic_ns()
    assert rig.read(2, 1)
    after_ns = time.monotonic_ns()
    (told,) = rig.served()
    assert (told.desk, list(told.ids), told.blocks, told.size_bytes) == (DESK, [1002, 1001], 2, 75_001)
    assert bytes(told.metadata) == METADATA
    assert before_ns <= told.began_ns <= told.ended_ns <= after_ns
    assert (told.corrupt, told.failed, told.cold) == (0, 0, None)
    assert rig.direct.blocks == 2
    assert rig.served() == []


def test_a_block_that_is_not_listed_is_not_read(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(5000))
    rig.blocks[2] = b"never listed"
    assert not rig.read(2)
    assert not rig.read(1, 2), "all or none"
    rig.unlist(1)
    assert not rig.read(1)
    rig.shelve(1, os.urandom(6000), at=8192, id=5000)
    assert rig.read(1), "the new one"


def test_a_look_up_is_answered_if_all_are_listed(rig: DirectRig) -> None:
    for number in range(20):
        rig.shelve(number, os.urandom(100), at=number * 128)
    keys = [key_of(number) for number in range(20)]
    assert rig.direct.has_all(FINGERPRINT, keys, METADATA)
    (told,) = rig.served()
    assert (told.is_prefix, told.blocks, list(told.ids), bytes(told.metadata)) == (1, 20, [], METADATA)
    assert not rig.direct.has_all(FINGERPRINT, [*keys, key_of(20)], METADATA)
    assert not rig.direct.has_all(b"g" * 16, keys, METADATA)
    assert not rig.direct.has_all(FINGERPRINT, [], METADATA)
    rig.unlist(7)
    assert not rig.direct.has_all(FINGERPRINT, keys, METADATA)
    assert rig.direct.has_all(FINGERPRINT, keys[:7] + keys[8:], METADATA)
    rig.node.fabric.close()
    assert not rig.direct.has_all(FINGERPRINT, keys[:7], METADATA)


def test_a_name_of_another_owner_layout_or_length_is_not_read(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(5000))
    assert not rig.read(1, direct=rig.reads(b"x" * 16))
    assert not rig.read(1, fingerprint=b"g" * 16)
    wanted = (key_of(1), 4999, 0, 0, rig.address, 0)
    assert rig.direct.read(FINGERPRINT, [wanted], METADATA, BYTES_MAX) is None
    assert rig.read(1)


def test_parts_and_pieces(rig: DirectRig) -> None:
    data = os.urandom(40_000)
    rig.shelve(1, data)
    for skip, part in ((0, 1), (17_000, 20_000), (39_999, 1), (0, 40_000)):
        rig.target[:] = bytes(len(rig.target))
        assert rig.direct.read(
            FINGERPRINT, [(key_of(1), 40_000, skip, part, rig.address, 0)], b"", BYTES_MAX
        ) == [False]
        assert rig.target[: part + 1] == data[skip : skip + part] + b"\0"
    for skip, part in ((1, 40_000), (40_000, 1), (1 << 31, 1)):
        assert (
            rig.direct.read(FINGERPRINT, [(key_of(1), 40_000, skip, part, rig.address, 0)], b"", BYTES_MAX)
            is None
        )
    near = rig.pair.near
    pieces = Pieces.of(near.region, [(50_000, 15_000), (0, 25_000)])
    wanted = (key_of(1), 40_000, 0, 0, rig.address, pieces.pointer)
    assert rig.direct.read(FINGERPRINT, [wanted], b"", BYTES_MAX) == [True]
    assert near.bytes_at(50_000, 15_000) + near.bytes_at(0, 25_000) == data
    others = Pieces.of(near.region, [(0, 39_999)])
    wanted = (key_of(1), 40_000, 0, 0, rig.address, others.pointer)
    assert rig.direct.read(FINGERPRINT, [wanted], b"", BYTES_MAX) == [False], (
        "pieces of another length are not used"
    )
    assert rig.target[:40_000] == data


def test_a_wrong_checksum_ends_direct_reads(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(50_000))
    rig.shelve(2, os.urandom(5000), at=65536)
    rig.node.fill(49_999, bytes([rig.blocks[1][-1] ^ 1]))
    assert rig.read(2)
    assert not rig.read(1)
    assert not rig.read(2), "this machine's memory can't be trusted"
    assert [list(told.ids) for told in rig.served()] == [[1002]]


def test_many_and_large_gets_are_calls(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(900_000))
    rig.shelve(2, os.urandom(100), at=950_000)
    rig.target = bytearray(4 << 20)
    rig.address = address_of(rig.target)
    assert rig.read(1, 1)
    assert not rig.read(1, 1, 1)
    assert rig.read(*[2] * BLOCKS_MAX)
    assert not rig.read(*[2] * (BLOCKS_MAX + 1))
    assert not rig.read()


def test_nothing_is_read_unless_the_desk_answers(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(5000))
    rig.desk.answers(answers=False)
    assert not rig.read(1)
    rig.desk.answers(answers=True)
    assert rig.read(1)
    rig.desk.log(0)
    assert not rig.read(1)
    rig.desk.answers(answers=True)
    assert not rig.read(1)
    assert len(rig.served()) == 1, "what was noted before is reported"


def test_nothing_is_read_once_the_node_has_ended(rig: DirectRig) -> None:
    """Although its memory, as mapped here, still says that the block is listed."""
    rig.shelve(1, os.urandom(5000))
    assert rig.read(1)
    rig.node.fabric.close()
    assert not rig.read(1)


def test_nothing_is_read_after_close(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(60_000))
    begun = threading.Event()

    def read() -> None:
        while (
            rig.direct.read(FINGERPRINT, [(key_of(1), 60_000, 0, 0, rig.address, 0)], b"", BYTES_MAX)
            is not None
        ):
            begun.set()
            rig.served()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    rig.direct.close()
    rig.target[:] = bytes(len(rig.target))
    reader.join(20)
    assert not reader.is_alive()
    assert rig.target == bytes(len(rig.target))


def test_close_waits_for_a_read_in_progress(rig: DirectRig) -> None:
    """The memory may be unmapped then."""
    rig.shelve(1, os.urandom(1_000_000))
    rig.target = bytearray(1_000_000)
    address = address_of(rig.target)
    for _ in range(20):
        one, begun, written_after = rig.reads(), threading.Event(), list[bool]()

        def read(one: DirectReads = one, begun: threading.Event = begun) -> None:
            begun.set()
            while (
                one.read(FINGERPRINT, [(key_of(1), 1_000_000, 0, 0, address, 0)], b"", BYTES_MAX) is not None
            ):
                rig.served()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(20)
        time.sleep(0.001)
        one.close()
        rig.target[-4096:] = bytes(4096)
        reader.join(20)
        written_after.append(rig.target[-4096:] != bytes(4096))
        assert written_after == [False]


def test_a_block_that_changes_while_it_is_copied_is_never_read_in_part(rig: DirectRig) -> None:
    """Its memory is used again at once for another version of it, while a reader reads as fast as it can."""
    length, versions = 500_000, 400
    rig.shelve(1, bytes(length))
    over = threading.Event()
    outcomes = [0, 0]

    def read() -> None:
        target = bytearray(length)
        wanted = (key_of(1), length, 0, 0, address_of(target), 0)
        while not over.is_set():
            is_read = rig.direct.read(FINGERPRINT, [wanted], b"", BYTES_MAX) is not None
            outcomes[is_read] += 1
            if is_read and target.count(target[0]) != length:
                outcomes.append(1)
                return
            if sum(outcomes) % 64 == 0:
                rig.served()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: outcomes[True] > 0, "a read of the first version")
        versions_of = random.Random(7)
        for version in range(1, versions):
            rig.unlist(1)
            assert rig.shelf.take([1001 if version == 1 else 10_000 + version - 1])[0]
            data = bytes([versions_of.randrange(256)]) * length
            rig.node.fill(0, data)
            rig.shelve(1, data, id=10_000 + version)
        before = outcomes[True]
        wait_until(lambda: outcomes[True] > before or not reader.is_alive(), "a read of the last version")
    finally:
        over.set()
        reader.join(20)
    assert len(outcomes) == 2, "bytes of two versions"
    assert rig.read(1), "no checksum was found wrong"


def test_names_that_find_no_free_slot_are_calls(rig: DirectRig) -> None:
    data, count = os.urandom(64), 3 * SLOTS_MIN
    for number in range(count):
        rig.shelve(number, data)
    here = []
    for number in range(count):
        if rig.read(number):
            here.append(number)
            rig.served()
    assert 0.9 * SLOTS_MIN < len(here) <= SLOTS_MIN
    other = rig.reads(b"x" * 16)
    assert not any(rig.read(number, direct=other) for number in here), "of the same owner only"
    for number in range(count):
        rig.unlist(number)
        rig.served()
    assert not any(rig.read(number) for number in here)
    for number in range(count, count + SLOTS_MIN // 4):
        rig.shelve(number, data)
    found = sum(rig.read(number) for number in range(count, count + SLOTS_MIN // 4))
    assert found == SLOTS_MIN // 4, "all slots had become free"


def test_nothing_of_a_block_is_left_in_the_directory(rig: DirectRig) -> None:
    """Clients have it mapped, and an erasure leaves no name."""
    rig.shelve(1, os.urandom(100))
    assert rig.directory.find(key_of(1)) > 0
    rig.unlist(1)
    slots = memoryview(rig.directory)[HEAD_BYTES:].cast("Q").tolist()
    assert [word for word in slots if word] == [4], "only its `seq`"


def test_a_name_is_found_behind_slots_that_became_free(rig: DirectRig) -> None:
    data = os.urandom(64)
    for number in range(SLOTS_MIN // 2):
        rig.shelve(number, data)
    for number in range(0, SLOTS_MIN // 2, 2):
        rig.unlist(number)
    for number in range(1, SLOTS_MIN // 2, 2):
        assert rig.read(number)


def test_nothing_is_read_in_a_forked_child(rig: DirectRig) -> None:
    """It would write to the log while its parent does, and may wait for a lock that no thread of it holds."""
    rig.shelve(1, os.urandom(100))
    child = os.fork()
    if not child:
        is_read = True
        try:
            is_read = rig.read(1) or rig.direct.has_all(FINGERPRINT, [key_of(1)], METADATA)
        finally:
            os._exit(is_read)
    assert os.waitpid(child, 0)[1] == 0
    assert rig.served() == []
    assert rig.read(1)


def test_a_thread_with_a_small_stack_reads(rig: DirectRig) -> None:
    rig.shelve(1, os.urandom(100))
    outcomes: list[bool] = []
    before = threading.stack_size(32 << 10)
    try:
        reader = threading.Thread(target=lambda: outcomes.append(rig.read(*[1] * BLOCKS_MAX)))
        reader.start()
    finally:
        threading.stack_size(before)
    reader.join(20)
    assert outcomes == [True]


def test_keys_and_layouts_of_another_length_are_a_call(rig: DirectRig) -> None:
    """No byte behind them is looked at."""
    rig.shelve(1, os.urandom(100))
    assert not rig.read(1, fingerprint=FINGERPRINT * 2)
    assert not rig.direct.has_all(FINGERPRINT * 2, [key_of(1)], METADATA)
    assert not rig.direct.has_all(FINGERPRINT, [key_of(1) + key_of(1)], METADATA)
    assert not rig.direct.has_all(FINGERPRINT, [key_of(1), b""], METADATA)


# --- opening


def test_a_directory_that_is_none_is_refused(rig: DirectRig) -> None:
    log = address_of(rig.log)
    for wrong in (
        bytes(100),
        bytes(directory_bytes(SLOTS_MIN)),
        rig.directory[: directory_bytes(SLOTS_MIN) - 128],
    ):
        with pytest.raises(FabricError):
            DirectReads(bytearray(wrong), rig.node.memory, log, OWNER)


_WITHOUT_ROBUST_MUTEXES = """
import ctypes, mmap, platform, struct
from nic_offload.errors import FabricError
from nic_offload.fabric import MEMORY, Fabric
from nic_offload.shelf import Shelf, directory_bytes

call = {"x86_64": 273, "aarch64": 99}[platform.machine()]
program = b"".join(struct.pack("=HBBI", *one) for one in (
    (0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)))
rules = ctypes.create_string_buffer(program, len(program))
given = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(rules))
libc = ctypes.CDLL(None, use_errno=True)
assert not libc.prctl(38, 1, 0, 0, 0) and not libc.prctl(22, 2, given, 0, 0), ctypes.get_errno()
with Fabric(MEMORY) as fabric:
    shelf = Shelf(fabric, fabric.register(bytearray(4096), remote_write=False))
    try:
        shelf.share(mmap.mmap(-1, directory_bytes(1)))
    except FabricError:
        print("refused")
"""


def test_nothing_is_shared_where_the_kernel_would_not_note_the_nodes_death() -> None:
    """As in a sandbox without `set_robust_list`: the directory would go on saying what was listed."""
    told = subprocess.run(
        [sys.executable, "-c", _WITHOUT_ROBUST_MUTEXES],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.strip() == "refused"


def test_a_shelf_is_shared_once_and_while_it_is_empty(rig: DirectRig) -> None:
    again = mmap.mmap(-1, directory_bytes(SLOTS_MIN))
    with pytest.raises(FabricError):
        rig.shelf.share(again)
    with Side(MEMORY).fabric as fabric, pytest.raises(FabricError):
        Shelf(fabric, fabric.register(bytearray(4096), remote_write=False)).share(mmap.mmap(-1, 4096))
