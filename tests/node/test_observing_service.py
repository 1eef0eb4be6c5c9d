"""Statistics and watching: what is counted and reported, to which callers, and readers that are too slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.errors import Overloaded
from kvstore.limits import (
    PIN_TIMEOUT_MS_MAX,
    PINS_OF_TENANT_MAX,
    WATCH_EVENTS_MAX,
    WATCH_EVENTS_SENT_MAX,
    WATCHERS_OF_TENANT_MAX,
)
from kvstore.miss import MissReason
from kvstore.names import block_key
from kvstore.node import observing_service
from kvstore.storage.eviction.types import Reason
from kvstore.wire import observing_pb2 as pb
from kvstore.wire import observing_pb2_grpc
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.storage.index_rows import rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client import Client, Happened
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
KEYS = [block_key(bytes([number])) for number in range(8)]


@pytest.fixture
def client(node: NodeInProcess) -> Iterator[Client]:
    with small_client(node.target, tenant="acme") as client:
        yield client


def tenant_id(node: NodeInProcess, client: Client) -> bytes:
    """The client's tenant, as the node's watches list it."""
    watch = client.watch(timeout_s=WAIT_S)
    assert next(watch) is None
    (known,) = node.call(lambda one: list(one.watchers._of_tenant))
    watch.close()
    wait_until(lambda: not node.call(lambda one: len(one.watchers)), "the watch ends with its call")
    return known  # type: ignore[no-any-return]


def test_all_work_is_counted(client: Client) -> None:
    client.put_inline(KEYS[0], b"abc")
    client.put_many_inline([(KEYS[1], b"abcd"), (KEYS[2], b"ab"), (KEYS[0], b"another length")])
    client.get_inline(KEYS[0], 3)
    client.get_inline(KEYS[0], 3)
    list(client.get_many_inline([(KEYS[1], 4), (KEYS[7], 4), (KEYS[2], 9)]))
    client.delete([KEYS[2]])
    client.pin([KEYS[0]], time_to_live_ms=PIN_TIMEOUT_MS_MAX)
    told = client.statistics()
    assert (told.puts, told.put_bytes, told.puts_failed, told.puts_key_taken) == (3, 9, 1, 1)
    assert (told.hits_memory, told.hits_drive, told.got_bytes) == (1, 2, 10)
    assert {one.reason: one.blocks for one in told.misses} == {MissReason.UNKNOWN: 1, MissReason.LENGTH: 1}
    assert {one.reason: one.blocks for one in told.evictions} == {Reason.DELETED: 1}
    assert (told.blocks, told.pins, told.connections, told.takes_puts) == (2, 1, 0, True)
    assert told.capacity_bytes > told.free_bytes > 0
    assert (told.quota_bytes, told.quota_used_bytes, told.refused) == (0, 0, 0)
    for _ in range(PINS_OF_TENANT_MAX - 1):
        client.pin(KEYS[:1], time_to_live_ms=PIN_TIMEOUT_MS_MAX)
    with pytest.raises(Overloaded):
        client.pin(KEYS[:1])
    assert client.statistics().refused == 1


def test_a_tenant_sees_its_own_quota(node: NodeInProcess, client: Client) -> None:
    whose = tenant_id(node, client)
    node.call(lambda one: one.store.change_quotas({whose: 1 << 20}))
    client.put_inline(KEYS[0], b"abc")
    told = client.statistics()
    assert (told.quota_bytes, told.quota_used_bytes) == (1 << 20, 8192)
    with small_client(node.target, tenant="zeta") as zeta:
        assert (zeta.statistics().quota_bytes, zeta.statistics().quota_used_bytes) == (0, 0)


def test_a_watcher_gets_its_own_tenants_events_in_order(node: NodeInProcess, client: Client) -> None:
    with small_client(node.target, tenant="zeta") as zeta:
        ours, theirs = client.watch(timeout_s=WAIT_S), zeta.watch(timeout_s=WAIT_S)
        assert [next(ours), next(theirs)] == [None, None]
        client.put_inline(KEYS[0], b"abc")
        zeta.put_inline(KEYS[5], b"abc")
        chat = client.session("ada", "chat")
        chat.append([KEYS[0]], 16)
        chat.fork("other")
        chat.truncate(0)
        chat.remove()
        client.delete([KEYS[0]])
        heard = [next(ours) for _ in range(6)]
        assert [(one.what, one.key, one.user, one.session, one.blocks) for one in heard if one] == [
            ("STORED", KEYS[0], "", "", 0),
            ("CHANGED", b"", "ada", "chat", 1),
            ("CHANGED", b"", "ada", "other", 1),
            ("CHANGED", b"", "ada", "chat", 0),
            ("REMOVED", b"", "ada", "chat", 0),
            ("DELETED", KEYS[0], "", "", 0),
        ]
        other = next(theirs)
        assert other is not None
        assert (other.what, other.key) == ("STORED", KEYS[5])


def test_an_eviction_is_reported_with_its_reason(node: NodeInProcess, client: Client) -> None:
    whose = tenant_id(node, client)
    node.call(lambda one: one.store.change_quotas({whose: 2 * 8192}))
    watch = client.watch(timeout_s=WAIT_S)
    next(watch)
    for key in KEYS[:3]:
        client.put_inline(key, b"abc")
    heard = [one for one in (next(watch) for _ in range(4)) if one is not None]
    assert ("QUOTA", KEYS[0]) in [(one.what, one.key) for one in heard]


def test_a_slow_watcher_learns_how_many_events_it_missed(node: NodeInProcess, client: Client) -> None:
    whose = tenant_id(node, client)
    watch = client.watch(timeout_s=WAIT_S)
    next(watch)
    names = [(whose, number.to_bytes(32, "little")) for number in range(WATCH_EVENTS_MAX + 100)]
    node.call(lambda one: one.watchers.blocks(rows(names), Reason.SPACE))
    heard: list[Happened] = []
    while len(heard) < WATCH_EVENTS_MAX:
        one = next(watch)
        if one is not None:
            heard.append(one)
    assert [one.key for one in heard] == [key for _, key in names[:WATCH_EVENTS_MAX]]
    assert sum(one.dropped for one in heard) == 100
    assert heard[0].dropped == 100
    assert WATCH_EVENTS_SENT_MAX < WATCH_EVENTS_MAX


def test_single_events_are_sent_in_few_messages(
    node: NodeInProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message costs a node as much as many events, for each watcher."""
    monkeypatch.setattr(observing_service, "WATCH_REST_MS", 500)
    mine = tenant_id(node, client)
    with grpc.insecure_channel(node.target) as channel:
        stub = observing_pb2_grpc.ObservingStub(channel)  # type: ignore[no-untyped-call]
        watch = iter(stub.Watch(pb.WatchRequest(tenant="acme"), timeout=WAIT_S))
        next(watch)
        messages = list[int]()
        for at in range(20):
            node.call(lambda one: one.watchers.blocks(rows([(mine, KEYS[0])]), None))
            if not at:  # this one is told at once
                messages.append(len(next(watch).events))
        while sum(messages) < 20:
            messages.append(len(next(watch).events))
    assert len(messages) < 5


def test_a_watch_sends_heartbeats_and_ends_at_its_time(
    node: NodeInProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observing_service, "WATCH_HEARTBEAT_MS", 20)
    assert len([one for one in client.watch(timeout_s=1.0) if one is None]) > 3
    wait_until(lambda: not node.call(lambda one: len(one.watchers)), "nobody watches any more")


def test_watchers_are_bounded(node: NodeInProcess, client: Client) -> None:
    with grpc.insecure_channel(node.target) as channel:
        stub = observing_pb2_grpc.ObservingStub(channel)  # type: ignore[no-untyped-call]
        calls = [
            stub.Watch(pb.WatchRequest(tenant="acme"), timeout=WAIT_S) for _ in range(WATCHERS_OF_TENANT_MAX)
        ]
        for call in calls:
            next(call)
        with pytest.raises(Overloaded):
            list(client.watch(timeout_s=WAIT_S))
        with small_client(node.target, tenant="zeta") as zeta:
            assert next(zeta.watch(timeout_s=WAIT_S)) is None
        calls[0].cancel()
        wait_until(lambda: client.statistics().watchers < WATCHERS_OF_TENANT_MAX, "one has gone")
        for call in calls:
            call.cancel()
