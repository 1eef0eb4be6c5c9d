"""Blocks in pieces: gathered when a put fires, scattered by a get, even if they were put in one piece."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from nic_offload import sender
from nic_offload.checksum import crc32c
from nic_offload.errors import FabricError, RegionBusy
from nic_offload.pieces import Pieces, scatter
from nic_offload.sender import put_row
from nic_offload.trigger import TriggeredPut, arm
from tests.nic_offload.rig import PAGE, Pair, wait_until
from tests.nic_offload.test_granted import DATA, FINGERPRINT, LANDED, MIB, SLOTS, GrantRig, key_of, open_rig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.fabric import Region
    from nic_offload.group import Group

PROVIDERS = ("net", "tcp;ofi_rxm", "shm", "sockets")
GATHER = 2 * MIB  # in the near memory, behind the data
ROOM = 128 << 10


@pytest.fixture(params=PROVIDERS)
def rig(request: pytest.FixtureRequest) -> Iterator[GrantRig]:
    for rig in open_rig(request.param):
        region = rig.pair.near.region
        rig.sender.gather(region, region.address + GATHER, ROOM)
        yield rig


@pytest.fixture
def net() -> Iterator[GrantRig]:
    for rig in open_rig("net"):
        region = rig.pair.near.region
        rig.sender.gather(region, region.address + GATHER, ROOM)
        yield rig


Extents = list[tuple[int, int]]


def some_pieces(region: Region, dice: random.Random, count: int, length_max: int) -> tuple[Pieces, Extents]:
    extents = []
    for _ in range(count):
        length = dice.randrange(1, length_max)
        extents.append((DATA + dice.randrange(MIB - length), length))
    return Pieces.of(region, extents), extents


def bytes_of(rig: GrantRig, extents: Extents) -> bytes:
    return b"".join(rig.pair.near.bytes_at(offset, length) for offset, length in extents)


def put(rig: GrantRig, blocks: list[tuple[int, Pieces]], *, threshold: int = 0) -> tuple[int, Group]:
    near = rig.pair.near
    tag = 1 << 30
    region = near.region
    rows = [
        put_row(region, region.address, pieces.length, threshold, key_of(number), pieces=pieces)
        for number, pieces in blocks
    ]
    trigger = near.counter(near.word(100)) if threshold else None
    return tag, sender.put(near.fabric, rig.sender, tag, rows, trigger, FINGERPRINT, LANDED)


def test_many_pieces_arrive_as_one_block_with_one_checksum(rig: GrantRig) -> None:
    dice = random.Random(5)
    blocks, wanted = [], {}
    for number in range(30):
        pieces, extents = some_pieces(rig.pair.near.region, dice, dice.randrange(1, 65), 1500 + number * 10)
        blocks.append((number, pieces))
        wanted[key_of(number)] = bytes_of(rig, extents)
    rig.feed(30, pages=1 + ROOM // PAGE)
    _, group = put(rig, blocks)
    assert rig.codes(group, 30) == [LANDED] * 30
    rig.wait_came(30)
    for came in rig.came:
        assert rig.payload(came) == wanted[came.key]
        assert came.crc32c == crc32c(wanted[came.key])


def test_pieces_are_read_when_the_put_fires(rig: GrantRig) -> None:
    near = rig.pair.near
    pieces = Pieces.of(near.region, [(DATA + 5000, 300), (DATA, 4096), (DATA + 100_000, 70_000)])
    rig.feed(1, pages=1 + ROOM // PAGE)
    _, group = put(rig, [(1, pieces)], threshold=3)
    near.fill(DATA + 5000, b"n" * 300)
    near.fill(DATA, b"e" * 4096)
    near.fill(DATA + 100_000, b"w" * 70_000)
    near.word(100).store(3)
    assert rig.codes(group, 1) == [LANDED]
    rig.wait_came(1)
    assert rig.payload(rig.came[0]) == b"n" * 300 + b"e" * 4096 + b"w" * 70_000


def test_pieces_outside_their_regions_are_refused(net: GrantRig) -> None:
    region = net.pair.near.region
    for wrong in [(region.length - 10, 11), (region.length, 1), (1 << 63, 8)]:
        with pytest.raises(FabricError) as caught:
            Pieces.of(region, [(0, 8), wrong])
        assert "out of range" in str(caught.value)
    with pytest.raises(FabricError):
        Pieces.of(region, [(0, 8), (8, 0)])
    with pytest.raises(FabricError):
        Pieces.of(region, [])
    with pytest.raises(FabricError):  # of a second region, where there is one
        Pieces([region], bytes([1, 0, 0, 0, 8, 0, 0, 0]) + bytes(8))


def test_more_pieces_than_there_is_room_for_are_refused_when_armed(net: GrantRig) -> None:
    region = net.pair.near.region
    with pytest.raises(FabricError):
        put(net, [(1, Pieces.of(region, [(DATA, ROOM), (DATA, 1)]))])


def test_a_region_cannot_be_closed_while_a_put_has_pieces_in_it(net: GrantRig) -> None:
    near = net.pair.near
    memory = bytearray(b"k" * 9000)
    region = near.fabric.register(memory)
    net.feed(1, pages=1 + ROOM // PAGE)
    _, group = put(net, [(1, Pieces.of(region, [(0, 4000), (5000, 4000)]))], threshold=9)
    with pytest.raises(RegionBusy):
        region.close()
    near.word(100).store(9)
    assert net.codes(group, 1) == [LANDED]
    net.wait_came(1)
    assert net.payload(net.came[0]) == b"k" * 8000
    wait_until(region._is_idle, "the end of the put")
    region.close()


def test_a_cancelled_put_of_pieces_reads_nothing_and_leaves_its_slot(net: GrantRig) -> None:
    near = net.pair.near
    pieces = Pieces.of(near.region, [(DATA, 4000), (DATA + 9000, 100)])
    tag, _ = put(net, [(one, pieces) for one in range(SLOTS)], threshold=4)
    assert near.fabric.cancel([tag + 2 * i for i in range(SLOTS)]) == SLOTS
    assert near.region._is_idle()
    net.feed(SLOTS, pages=1 + ROOM // PAGE)
    _, group = net.put(list(range(10, 10 + SLOTS)))
    assert net.codes(group, SLOTS) == [LANDED] * SLOTS


def test_a_plain_put_gathers_too_and_is_checksummed_only_on_request(rig: GrantRig) -> None:
    """A put that reserved its slot names the memory in which it is gathered."""
    pair, near = rig.pair, rig.pair.near
    extents = [(DATA + 10, 5000), (DATA + 70_000, 20_000), (DATA, 10)]
    pieces, wanted = Pieces.of(near.region, extents), bytes_of(rig, extents)
    there = 8 * MIB
    for number, crc in enumerate([None, crc32c(wanted), crc32c(wanted) ^ 1]):
        tag = 77 + number
        put = TriggeredPut(
            tag=tag,
            endpoint=near.endpoint,
            peer=pair.there.peer,
            region=near.region,
            source=near.region.address + GATHER,
            length=pieces.length,
            target=pair.there.base + there + number * MIB // 4,
            target_key=pair.there.key,
            crc32c=crc,
            pieces=pieces,
        )
        arm(near.fabric, [put])
        assert near.final(tag).status == (-errno.EBADMSG if number == 2 else 0)
        if number < 2:
            at = there + number * MIB // 4
            wait_until(lambda at=at: pair.far.bytes_at(at, pieces.length) == wanted, "the bytes")  # type: ignore[misc]


def test_a_put_of_pieces_is_not_handed_to_a_nic() -> None:
    """It would read them before anything has gathered them."""
    with Pair("sockets", 16 * MIB, deferred_work=True) as pair:
        near = pair.near
        assert near.fabric.deferred_work
        near.fill(DATA, b"p" * 9000)
        pieces = Pieces.of(near.region, [(DATA + 8000, 1000), (DATA, 1000)])
        put = TriggeredPut(
            tag=7,
            endpoint=near.endpoint,
            peer=pair.there.peer,
            region=near.region,
            source=near.region.address + GATHER,
            length=pieces.length,
            target=pair.there.base,
            target_key=pair.there.key,
            trigger=near.counter(near.word(100)),
            threshold=5,
            pieces=pieces,
        )
        arm(near.fabric, [put])
        pair.there.fence()
        assert near.fabric.statistics().held == 0
        near.word(100).store(5)
        assert near.final(7).status == 0
        wait_until(lambda: pair.far.bytes_at(0, 2000) == b"p" * 2000, "the bytes")


def test_a_part_of_an_unchanged_block_is_put(rig: GrantRig) -> None:
    pair, near = rig.pair, rig.pair.near
    whole = near.bytes_at(DATA, 50_000)
    there = 8 * MIB
    tags = iter(range(500, 600))

    def part(skip: int, length: int, crc: int | None) -> int:
        tag = next(tags)
        put = TriggeredPut(
            tag=tag,
            endpoint=near.endpoint,
            peer=pair.there.peer,
            region=near.region,
            source=near.region.address + DATA,
            length=len(whole),
            target=pair.there.base + there,
            target_key=pair.there.key,
            crc32c=crc,
            part=(skip, length),
        )
        arm(near.fabric, [put])
        return near.final(tag).status

    for skip, length in [(0, 1), (49_999, 1), (0, 50_000), (4096, 8192), (17, 30_011)]:
        pair.far.fill(there, bytes(60_000))
        assert part(skip, length, crc32c(whole)) == 0
        wanted = whole[skip : skip + length]
        wait_until(lambda w=wanted: pair.far.bytes_at(there, len(w)) == w, "the part")  # type: ignore[misc]
        assert pair.far.bytes_at(there + length, 60_000 - length) == bytes(60_000 - length)
    # A byte that is not in the part has changed: nothing of it is to be believed.
    near.fill(DATA + 49_000, bytes([whole[49_000] ^ 1]))
    assert part(0, 4096, crc32c(whole)) == -errno.EBADMSG
    for skip, length in [(0, 50_001), (50_000, 1), (49_000, 1001), ((1 << 32) - 1, 2)]:
        with pytest.raises(FabricError):
            part(skip, length, crc32c(whole))
    with pytest.raises(FabricError):
        part(0, 10, None)


def test_blocks_are_scattered_into_their_pieces_and_nowhere_else(net: GrantRig) -> None:
    dice = random.Random(8)
    near = net.pair.near
    memory = bytearray(200_000)
    region = near.fabric.register(memory)
    places = list(range(0, 200_000, 2000))
    dice.shuffle(places)
    blocks, wanted = [], bytearray(200_000)
    for number in range(10):
        mine = [(at, dice.randrange(1, 2000)) for at in places[number * 8 : number * 8 + 8]]
        pieces = Pieces.of(region, mine)
        begin = DATA + number * 20_000
        source = near.bytes_at(begin, pieces.length)
        for offset, length in mine:
            wanted[offset : offset + length], source = source[:length], source[length:]
        blocks.append((pieces, near.region.address + begin))
    scatter(blocks)
    assert memory == wanted
    region.close()
