"""The guarantees of a put hold on every path, and protection survives a restart."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, Expired, NoSpace, SessionRefused
from kvstore.limits import BATCH_BLOCKS_MAX, PAGE_BYTES, SESSION_BLOCKS_MAX
from kvstore.names import block_key
from kvstore.storage.eviction.types import Guard
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.node.node import Node

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
SOON_MS = 1_500
LATE_MS = 300  # after the end of a life, by when its lease has certainly ended
KEY = block_key(b"the block")
PAYLOAD = b"kv" * 2048


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
def client(node: NodeInProcess) -> Iterator[Client]:
    with small_client(node.target) as client:
        yield client


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def over_the_fabric(client: Client, durability: Durability, expires_ms: int) -> None:
    with FlagWords.create(1) as flags:
        memory = allocate(len(PAYLOAD))
        memory[:] = PAYLOAD
        with client.register(memory) as region:
            block = Block(KEY, region, 0, len(PAYLOAD), threshold=1)
            puts = client.arm([block], flags[0], durability=durability, expires_unix_ms=expires_ms)
            flags[0].store(1)
            (result,) = puts.wait(WAIT_S)
            if result.error is not None:
                raise result.error


def inline(client: Client, durability: Durability, expires_ms: int) -> None:
    client.put_inline(KEY, PAYLOAD, durability=durability, expires_unix_ms=expires_ms)


def in_a_batch(client: Client, durability: Durability, expires_ms: int) -> None:
    (result,) = client.put_many_inline([(KEY, PAYLOAD)], durability=durability, expires_unix_ms=expires_ms)
    if result.error is not None:
        raise result.error


WAYS = [over_the_fabric, inline, in_a_batch]


def life(node: NodeInProcess) -> list[tuple[int, bool]]:
    """When each block expires, and whether it would survive power loss for as long."""

    def look(one: Node) -> list[tuple[int, bool]]:
        drive = one.store.drives[0]
        return [(entry.expires_ms, drive.has_synced(entry.generation)) for _, entry in drive._index.entries()]

    return node.call(look)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
def test_a_put_without_expiry_after_one_with_expiry_does_not_expire(
    data: Path, way: Callable[[Client, Durability, int], None]
) -> None:
    with NodeInProcess(data) as node, small_client(node.target) as client:
        inline(client, Durability.WRITTEN, now_ms() + SOON_MS)
        way(client, Durability.WRITTEN, 0)
        assert [expires for expires, _ in life(node)] == [0]
    time.sleep(SOON_MS / 1000)
    with NodeInProcess(data) as node, small_client(node.target) as client:
        assert client.get_inline(KEY, len(PAYLOAD)) == PAYLOAD


@pytest.mark.parametrize("way", WAYS)
def test_a_synced_put_after_a_written_put_is_synced(
    node: NodeInProcess, client: Client, way: Callable[[Client, Durability, int], None]
) -> None:
    inline(client, Durability.WRITTEN, now_ms() + 60_000)
    assert not life(node)[0][1]
    way(client, Durability.SYNCED, 0)
    assert life(node) == [(0, True)]


@pytest.mark.parametrize("way", WAYS)
def test_a_put_with_an_expiry_in_the_past_is_refused_with_a_typed_error(
    node: NodeInProcess, client: Client, way: Callable[[Client, Durability, int], None]
) -> None:
    with pytest.raises(Expired):
        way(client, Durability.WRITTEN, now_ms() - 1)
    assert life(node) == []


def test_a_time_to_live_that_ends_before_the_bytes_arrive_is_no_success(
    node: NodeInProcess, client: Client
) -> None:
    with FlagWords.create(1) as flags, client.register(allocate(PAGE_BYTES)) as region:
        block = Block(KEY, region, 0, PAGE_BYTES, threshold=1)
        client.attach()  # which takes a while
        over_ms = now_ms() + SOON_MS
        puts = client.arm([block], flags[0], expires_unix_ms=over_ms)
        wait_until(lambda: now_ms() > over_ms + LATE_MS, "its time is over")
        flags[0].store(1)
        (result,) = puts.wait(WAIT_S)
    assert isinstance(result.error, Expired)
    assert life(node) == []


def test_a_block_that_lives_long_enough_is_already_stored(client: Client) -> None:
    inline(client, Durability.WRITTEN, now_ms() + 60_000)
    with client.register(allocate(len(PAYLOAD))) as region:
        block = Block(KEY, region, 0, len(PAYLOAD), threshold=1)
        for expires_ms, stored in ((now_ms() + 30_000, 1), (now_ms() + 90_000, 0), (0, 0)):
            reservation = client.reserve([block], expires_unix_ms=expires_ms)
            assert reservation.already_stored == stored
            reservation.give_back()


# Sessions.


def fill(client: Client, count: int) -> list[bytes]:
    keys = [block_key(b"turn", number.to_bytes(4)) for number in range(count)]
    client.put_many_inline([(key, b"kv") for key in keys])
    return keys


def test_a_refused_append_beyond_a_sessions_maximum_leaves_nothing_behind(client: Client) -> None:
    keys = fill(client, 8)
    chat = client.session("ada", "chat")
    with pytest.raises(SessionRefused, match="Nothing was"):
        chat.append([keys[number % 8] for number in range(SESSION_BLOCKS_MAX + 1)], 16)
    assert list(client.sessions("ada")) == []
    chat.append(keys, 16)
    with pytest.raises(SessionRefused):
        client.session("ada", "chat").append([keys[0]] * (SESSION_BLOCKS_MAX - 7), 16)
    assert chat.info().blocks == 8


def test_a_long_append_with_an_unstored_block_leaves_nothing_behind(client: Client) -> None:
    keys = fill(client, 8)
    chat = client.session("ada", "chat")
    long = [keys[number % 8] for number in range(3 * BATCH_BLOCKS_MAX)]
    with pytest.raises(SessionRefused, match="not"):
        chat.append([*long, block_key(b"never stored")], 16)
    assert list(client.sessions("ada")) == []
    assert chat.append(long, 16) == len(long)
    assert [turn.blocks for turn in chat.info().turns] == [range(len(long))]


def test_the_longest_append_is_one_turn_and_executed_once(client: Client) -> None:
    keys = fill(client, 8)
    chat = client.session("ada", "chat")
    longest = [keys[number % 8] for number in range(SESSION_BLOCKS_MAX)]
    assert chat.append(longest, 16) == SESSION_BLOCKS_MAX
    assert chat.keys() == longest
    assert len(chat.info().turns) == 1


def guarded(node: NodeInProcess) -> int:
    return node.call(lambda one: one.store.statistics().eviction.guarded[Guard.PROTECTED])  # type: ignore[no-any-return]


@pytest.mark.parametrize("index_survives", [True, False])
def test_protected_sessions_stay_protected_after_a_restart(data: Path, *, index_survives: bool) -> None:
    with NodeInProcess(data) as node, small_client(node.target) as client:
        keys = fill(client, 8)
        client.session("ada", "chat").append(keys, 16)
        client.session("ada", "chat").protect(5)
        assert guarded(node) == 5
    if not index_survives:
        (data / "index-0" / "data.mdb").unlink()
    with NodeInProcess(data) as node, small_client(node.target) as client:
        assert guarded(node) == 5
        assert client.session("ada", "chat").unprotect()
        assert not client.session("ada", "chat").unprotect()
        assert guarded(node) == 0
    with NodeInProcess(data) as node:
        assert guarded(node) == 0


def test_acknowledged_blocks_remain_when_everything_is_protected(data: Path) -> None:
    with ExitStack() as stack:
        node = stack.enter_context(NodeInProcess(data, 16 << 20))
        client = stack.enter_context(small_client(node.target))
        keys = [block_key(b"kept", number.to_bytes(4)) for number in range(15)]
        client.put_many_inline([(key, bytes(1 << 20)) for key in keys[:15]])
        client.session("ada", "chat").append(keys[:15], 16)
        client.session("ada", "chat").protect()
        acknowledged = []
        for number in range(200):
            key = block_key(b"more", number.to_bytes(4))
            with suppress(NoSpace):
                client.put_inline(key, bytes(900_000))
                acknowledged.append(key)
        time.sleep(0.3)
        assert [key for key in acknowledged if client.get_inline(key, 900_000) != bytes(900_000)] == []


# What became of it.


def test_a_put_after_its_lease_is_explained(client: Client) -> None:
    with FlagWords.create(1) as flags, client.register(allocate(PAGE_BYTES)) as region:
        block = Block(KEY, region, 0, PAGE_BYTES, threshold=1)
        puts = client.reserve([block], lease_ms=2000).arm(flags[0])
        time.sleep(2.1)
        flags[0].store(1)
        (result,) = puts.wait(WAIT_S)
        assert result.error is not None

    def said() -> str:
        return str(client.explain([KEY])[0])

    wait_until(lambda: "its lease ended" in said() and "had not landed" in said(), "the node knows why")
    assert client.exists([KEY])[0].detail == "its lease ended before it had landed"  # type: ignore[union-attr]
    inline(client, Durability.WRITTEN, 0)
    assert said() == "The block is stored."
    client.delete([KEY])
    assert "deleted" in said(), "what came last is what is said"


def test_a_reserved_put_that_its_client_gives_up_at_its_end_is_counted_as_late(
    node: NodeInProcess, client: Client
) -> None:
    """A client gives up before the lease ends, so the node's own clock alone would count none."""
    with FlagWords.create(1) as flags, client.register(allocate(PAGE_BYTES)) as region:
        block = Block(KEY, region, 0, PAGE_BYTES, threshold=1)
        puts = client.reserve([block], lease_ms=500).arm(flags[0])
        (result,) = puts.wait(WAIT_S)
    assert isinstance(result.error, DeadlineExceeded)
    wait_until(lambda: client.statistics().leases_expired == 1, "it is counted")
    assert client.statistics().puts_failed == 1
    rows = node.call(lambda inside: list(inside.timings.puts.values()))
    assert [(row.failed, row.failure) for row in rows] == [(1, "LeaseExpired")]


def test_a_lease_that_was_never_returned_is_explained(client: Client) -> None:
    with client.register(allocate(PAGE_BYTES)) as region:
        client.reserve([Block(KEY, region, 0, PAGE_BYTES)], lease_ms=1)
        wait_until(lambda: "its lease ended" in str(client.explain([KEY])[0]), "the lease is over")


def test_a_lease_returned_at_once_is_not_a_lost_put(client: Client) -> None:
    with client.register(allocate(PAGE_BYTES)) as region:
        client.reserve([Block(KEY, region, 0, PAGE_BYTES)]).give_back()
        assert "never stored" in str(client.explain([KEY])[0])
        assert client.statistics().leases_expired == 0


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_put_that_lands_after_its_expiry_is_not_acknowledged(client: Client, *, is_asked: bool) -> None:
    with FlagWords.create(1) as flags, client.register(allocate(len(PAYLOAD))) as region:
        block = Block(KEY, region, 0, len(PAYLOAD), threshold=1)
        client.attach()  # which takes a while
        over_ms = now_ms() + SOON_MS
        if is_asked:
            reserved = client.reserve([block], durability=Durability.LANDED, expires_unix_ms=over_ms)
            puts = reserved.arm(flags[0])
        else:
            puts = client.arm([block], flags[0], durability=Durability.LANDED, expires_unix_ms=over_ms)
        wait_until(lambda: now_ms() > over_ms + LATE_MS, "its time is over")
        flags[0].store(1)
        assert isinstance(puts.wait(WAIT_S)[0].error, Expired)
