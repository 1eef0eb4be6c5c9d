"""Gets from hot memory: without the drive, never with another record's bytes or damaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.miss import Miss, MissReason
from kvstore.node.hot_pages import HotPages
from kvstore.storage.index_layout import rows_of_entries
from tests.client.test_promises import flip_a_bit_of, put
from tests.conftest import MIB, ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import kept_in

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.node.hot_pages import HotStatistics
    from kvstore.node.node import Node
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0


def hot(node: NodeInProcess) -> HotStatistics:
    def told(inside: Node) -> HotStatistics:
        inside.catch_up()
        return inside.hot.pages.statistics()

    return node.call(told)  # type: ignore[no-any-return]


def get(rig: ClientWithBuffers, *blocks: Block) -> list[Any]:
    rig.target[:] = bytes(len(rig.target))
    return rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)


def test_the_second_get_needs_no_drive(tmp_path: Path, node: NodeInProcess, rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number, 200_000) for number in range(4)]
    put(rig, blocks)
    assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    wait_until(lambda: hot(node).kept == 4, "those that were read are kept")
    for block in blocks:
        piece = rig.source[block.offset : block.offset + block.length]
        flip_a_bit_of(tmp_path / "node" / "drive-0.kv", piece, 5000)
    assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    assert all(rig.is_exact(block) for block in blocks)
    assert hot(node).found == 4


@pytest.mark.parametrize("on_shelf", [False, True])
def test_bytes_that_changed_in_memory_are_read_from_the_drive_instead(
    node: NodeInProcess,
    rig: ClientWithBuffers,
    on_shelf: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """The node's thread rereads them at once; the C core, which reads no drive, reports a miss."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(inside.hot.pages.generation(kept_in(inside)[0]))
        assert piece is not None
        inside.hot.payload(piece, 100_000)[77_777] ^= 1
        inside.hot.pages.release(piece)
        assert len(inside.hot.shelf) == 1
        if not on_shelf:
            inside.hot.shelf.take([inside.hot.pages.generation(piece)])

    node.call(damage)
    if on_shelf:
        assert [one.reason for one in get(rig, block)] == [MissReason.CORRUPT]
        assert bytes(rig.target) == bytes(len(rig.target))
    for _ in range(2):
        assert get(rig, block) == [Hit(block.key)]
        assert rig.is_exact(block)
    assert rig.client.status().corrupt_found == 0


def test_a_replaced_block_is_not_served_from_memory(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    """A name is written anew once its first block is over, with other bytes under another generation."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]
    tenant = next(iter(node.call(lambda inside: list(inside.connections.values())))).tenant
    (entry,) = node.call(lambda inside: inside.store.lookup([(tenant, block.key)]))
    node.call(lambda inside: inside.store.quarantine(tenant, block.key, entry.generation))
    rig.source[: block.length] = bytes(reversed(rig.source[: block.length]))
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]
    assert rig.is_exact(block)


def test_another_layout_or_length_finds_nothing_in_memory(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    block = rig.block(0, 100_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]
    shorter = Block(block.key, rig.to_region, block.offset, 50_000)
    (outcome,) = rig.client.get([shorter], timeout_s=WAIT_S)
    assert not isinstance(outcome, Hit)
    with Client(node.target, layout=b"another", slots=1, block_bytes_max=MIB) as other:
        region = other.register(bytearray(MIB))
        (outcome,) = other.get([Block(block.key, region, 0, block.length)], timeout_s=WAIT_S)
        assert not isinstance(outcome, Hit)
    assert hot(node).found == 0


def test_more_blocks_than_fit_in_memory_pass_through_it(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    """Inline gets and fetches share it; those that find no room wait, and none waits forever."""
    blocks = [rig.block(number, 1 << 20) for number in range(16)]
    put(rig, blocks)
    whole = node.call(lambda inside: inside.hot.pages.take(inside.hot.pages._pages - 600))
    for _ in range(3):
        assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
        assert all(rig.is_exact(block) for block in blocks)
    rest = node.call(lambda inside: inside.hot.pages.take(600))
    assert rest is not None
    waiting = rig.client.get([rig.wanted(blocks[0])], timeout_s=0.3)
    assert not isinstance(waiting[0], Hit)
    node.call(lambda inside: inside.hot.pages.release(rest))
    wait_until(lambda: not rig.client._core.breaker.is_open, "the client tries again")
    assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    node.call(lambda inside: inside.hot.pages.release(whole))


def test_an_inline_get_finds_and_leaves_blocks_in_memory_too(
    tmp_path: Path, node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    data = rig.source[:100_000]
    rig.client.put_inline(rig.key(0), data)
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    flip_a_bit_of(tmp_path / "node" / "drive-0.kv", data, 5000)
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    assert hot(node).found == 1

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(inside.hot.pages.generation(kept_in(inside)[0]))
        assert piece is not None
        inside.hot.payload(piece, 100_000)[77_777] ^= 1
        inside.hot.pages.release(piece)

    node.call(damage)
    outcome = rig.client.get_inline(rig.key(0), len(data))
    assert isinstance(outcome, Miss), "the drive's bytes are broken as well"


def test_an_inline_get_replaces_bytes_that_changed_in_memory(
    tmp_path: Path, node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    data = rig.source[:100_000]
    rig.client.put_inline(rig.key(0), data)
    assert rig.client.get_inline(rig.key(0), len(data)) == data

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(inside.hot.pages.generation(kept_in(inside)[0]))
        assert piece is not None
        inside.hot.payload(piece, 100_000)[77_777] ^= 1
        inside.hot.pages.release(piece)

    node.call(damage)
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    flip_a_bit_of(tmp_path / "node" / "drive-0.kv", data, 5000)
    assert rig.client.get_inline(rig.key(0), len(data)) == data, "the drive's bytes have taken their place"


# --- what is gone takes no room


def drop_by_deleting(_: NodeInProcess, rig: ClientWithBuffers, blocks: list[Block]) -> None:
    rig.client.delete([block.key for block in blocks])


def drop_by_evicting(node: NodeInProcess, _: ClientWithBuffers, blocks: list[Block]) -> None:
    def evict(inside: Node) -> None:
        (drive,) = inside.store.drives
        assert len(kept_in(inside)) == len(blocks)
        drive.keeping.clear([inside.hot.pages.generation(piece) for piece in kept_in(inside)])

    node.call(evict)


def drop_by_quarantine(node: NodeInProcess, *_: object) -> None:
    def quarantine(inside: Node) -> None:
        (drive,) = inside.store.drives
        generations = [inside.hot.pages.generation(piece) for piece in kept_in(inside)]
        for (tenant, key), entry in drive._index.of_generations(generations):
            inside.store.quarantine(tenant, key, entry.generation)

    node.call(quarantine)


@pytest.mark.parametrize("drop", [drop_by_deleting, drop_by_evicting, drop_by_quarantine])
def test_removed_blocks_free_their_hot_memory(node: NodeInProcess, rig: ClientWithBuffers, drop: Any) -> None:
    """Also those that were requested again, which a scan would not have evicted."""
    blocks = [rig.block(number, 200_000) for number in range(6)]
    put(rig, blocks)
    for _ in range(3):
        assert get(rig, *blocks) == [Hit(block.key) for block in blocks]
    before = hot(node)
    assert (before.kept, before.protected_bytes) == (6, before.kept_bytes)
    drop(node, rig, blocks)
    after = hot(node)
    assert (after.kept, after.kept_bytes, after.protected_bytes) == (0, 0, 0)
    assert all(isinstance(one, Miss) for one in get(rig, *blocks))


def test_an_expired_block_frees_its_hot_memory(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    block = rig.block(0, 200_000)
    expires_ms = node.call(lambda inside: inside.clock.wall_ms()) + 5000
    puts = rig.client.reserve([block], expires_unix_ms=expires_ms).arm(rig.flags[0])
    rig.flags[0].store(1)
    assert puts.wait(WAIT_S)[0].error is None
    assert get(rig, block) == [Hit(block.key)]
    assert hot(node).kept == 1
    wait_until(lambda: hot(node).kept == 0, "its time is over")


def test_a_replaced_block_frees_its_hot_memory(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    """A put under the key of an expired block replaces it; the new block is cached when it is read."""
    block = rig.block(0, 200_000)
    put(rig, [block])
    assert get(rig, block) == [Hit(block.key)]

    def replace(inside: Node) -> None:
        (drive,) = inside.store.drives
        ((name, entry),) = drive._index.entries()
        inside.hot.changed(rows_of_entries([(name, entry)]), are_new=True)
        assert inside.hot.pages.statistics().kept == 1, "it is the index's still"
        newer = entry._replace(generation=entry.generation + 1)
        inside.hot.changed(rows_of_entries([(name, newer)]), are_new=True)

    node.call(replace)
    assert hot(node).kept == 0


@pytest.mark.parametrize("way", ["fetch", "inline", "prefetch"])
def test_a_block_removed_while_it_is_read_is_not_cached(
    node: NodeInProcess, rig: ClientWithBuffers, way: str
) -> None:
    block = rig.block(0, 200_000)
    put(rig, [block])

    def read_then_delete(inside: Node) -> None:
        """Delete between the drive's answer and its handling."""
        real = inside.store.get

        def get_of(items: Any, done: Any) -> None:
            def first_gone(batch: Any) -> None:
                inside.store.quarantine(items[0].tenant, items[0].key, batch[0].generation)
                done(batch)

            real(items, first_gone)

        def keep() -> None:
            for fetch in inside.fetches._arrived:
                inside.store.quarantine(*fetch.name, fetch.generation)
            del vars(inside.fetches)["_keep_arrived"]
            inside.fetches._keep_arrived()

        vars(inside.store)["get"] = get_of
        vars(inside.fetches)["_keep_arrived"] = keep

    node.call(read_then_delete)
    if way == "fetch":
        get(rig, block)
    elif way == "inline":
        rig.client.get_inline(block.key, block.length)
    else:
        ended: list[object] = []

        def prefetch(inside: Node) -> None:
            (connection,) = inside.connections.values()
            wish = inside.prefetches.wish(connection.tenant, 1, ended.append)
            wish.add([block.key])
            inside.prefetches.queue(wish)

        node.call(prefetch)
        wait_until(lambda: bool(ended), "the prefetch is over")
    wait_until(lambda: hot(node).kept == 0, "nothing dead is kept")
    node.call(lambda inside: inside.fabric_calls.cold.empty())
    assert node.call(lambda inside: inside.hot.pages.take(hot_pages(inside))) is not None, (
        "all pages are free"
    )


def hot_pages(inside: Node) -> int:
    return inside.hot.pages.statistics().capacity_bytes // 4096


def test_dead_blocks_make_room_for_a_waiting_put() -> None:
    freed: list[bool] = []
    pages = HotPages(4, lambda: freed.append(True))
    piece, used = pages.take(2), pages.take(2)
    assert piece is not None
    assert used is not None
    pages.keep(piece, 7)
    assert pages.take(2) is None
    pages.drop([7])
    assert freed == [], "it is in use still"
    pages.release(piece)
    assert freed == [True]
    assert pages.take(2) is not None
