"""The node's history of look-ups: every kind of look-up, every reason of a miss, tenants, and bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.client import Block, Client, as_request
from kvstore.errors import NodeUnavailable, Overloaded
from kvstore.limits import (
    LOOKUP_BLOCKS_MAX,
    LOOKUP_ID_BYTES_MAX,
    LOOKUP_RUNS_MAX,
    LOOKUPS_BYTES_MAX,
    LOOKUPS_MAX,
    LOOKUPS_WAITING_MAX,
)
from kvstore.lookups import Kind, Lookup, Outcome, Run, runs_of
from kvstore.miss import MissReason
from kvstore.names import block_key, layout_fingerprint
from kvstore.node.call_headers import FabricHeaders
from kvstore.node.lookup_history import Lookups
from kvstore.wire import kvstore_pb2, lookups_pb2_grpc
from kvstore.wire import lookups_pb2 as pb
from kvstore.wire.lookup_messages import LOOKUPS_HEADER, REQUEST_HEADER, lookup_message, lookup_of
from nic_offload.fabric import Event, EventKind
from nic_offload.memory import allocate
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HeldDrive, NodeInProcess
from tests.node.test_tenants import HeldClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from kvstore.node.node import Node

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
PAGE = 4096
KEYS = [block_key(bytes([number])) for number in range(12)]


@pytest.fixture
def client(node: NodeInProcess) -> Iterator[Client]:
    with small_client(node.target, tenant="acme") as client:
        yield client


def told(node: NodeInProcess, request_id: str = "", tenant: str = "acme", **more: Any) -> list[Lookup]:
    with grpc.insecure_channel(node.target) as channel:
        stub = lookups_pb2_grpc.LookupsStub(channel)  # type: ignore[no-untyped-call]
        request = pb.ListLookupsRequest(tenant=tenant, request_id=request_id, **more)
        return [lookup_of(one) for one in stub.ListLookups(request, timeout=WAIT_S).lookups]


def outcomes(lookup: Lookup) -> list[tuple[int, Outcome]]:
    return [(run.blocks, run.outcome) for run in lookup.runs]


def test_each_kind_of_look_up_is_recorded_with_the_outcome_of_its_blocks(
    node: NodeInProcess, client: Client
) -> None:
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:4]])
    kv = client.register(allocate(8 * PAGE))
    with as_request("cmpl-7") as request_id:
        assert request_id == "cmpl-7"
        client.prefix(KEYS[:8])
        client.exists(KEYS[:6])
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:6])], timeout_s=WAIT_S)
        # A get that arrives before the node has kept the blocks it has sent reads the drive once more.
        wait_until(lambda: node.call(lambda one: one.hot.pages.statistics().kept) == 4, "they are kept")
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:4])], timeout_s=WAIT_S)
        client.get_inline(KEYS[0], PAGE)
        list(client.get_many_inline([(KEYS[9], PAGE), (KEYS[1], PAGE), (KEYS[2], 9)]))
    client.exists(KEYS[:1])
    prefix, exists, first, again, one, many = told(node, "cmpl-7")
    assert (prefix.kind, prefix.blocks) == (Kind.PREFIX, 8)
    assert outcomes(prefix) == [(4, Outcome.STORED), (1, Outcome.NEVER)]
    assert (prefix.examined, prefix.by_caller) == (5, False)
    assert outcomes(exists) == [(4, Outcome.STORED), (2, Outcome.NEVER)]
    assert first.kind is Kind.FETCH
    assert outcomes(first) == [(4, Outcome.DRIVE), (2, Outcome.NEVER)]
    assert first.size_bytes == 4 * PAGE
    assert 0 < first.drive_us <= first.took_us
    assert first.queued_us <= first.took_us
    assert (outcomes(again), again.drive_us) == ([(4, Outcome.MEMORY)], 0)
    assert (one.kind, outcomes(one), one.size_bytes) == (Kind.GET, [(1, Outcome.MEMORY)], PAGE)
    assert (many.kind, many.blocks) == (Kind.GET, 3)
    assert outcomes(many) == [(1, Outcome.NEVER), (1, Outcome.MEMORY), (1, Outcome.LENGTH)]
    assert len(told(node)) == 7, "the look-up of another request has an id of its own"
    assert {one.request_id for one in told(node, last=1)}.isdisjoint({"cmpl-7", ""})


def test_only_a_read_of_the_drive_has_a_drive_time(node: NodeInProcess, client: Client) -> None:
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:2]])
    kv = client.register(allocate(3 * PAGE))
    with as_request("misses"):
        client.get_inline(KEYS[9], PAGE)
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[9:])], timeout_s=WAIT_S)
        list(client.get_many_inline([(KEYS[9], PAGE), (KEYS[0], 9)]))
    with as_request("reads"):
        list(client.get_many_inline([(KEYS[9], PAGE), (KEYS[0], PAGE)]))
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:2])], timeout_s=WAIT_S)
        wait_until(lambda: node.call(lambda one: one.hot.pages.statistics().kept) == 2, "they are kept")
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:2])], timeout_s=WAIT_S)
    assert [one.drive_us for one in told(node, "misses")] == [0, 0, 0]
    assert [one.drive_us > 0 for one in told(node, "reads")] == [True, True, False]


def test_each_kind_of_miss_is_distinguished(node: NodeInProcess, client: Client) -> None:
    now_ms = node.call(lambda one: one.clock.wall_ms())
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:3]])
    client.put_inline(KEYS[3], bytes(PAGE), expires_unix_ms=now_ms + 2500)
    client.delete([KEYS[1]])
    with small_client(node.target, tenant="acme", layout=b"another") as other:
        other.put_inline(KEYS[4], bytes(PAGE))
        other.put_inline(KEYS[11], bytes(PAGE))
    kv = client.register(allocate(PAGE))
    client.reserve([Block(KEYS[5], kv, 0, PAGE)], lease_ms=1)  # neither armed nor given back
    wait_until(lambda: client.explain([KEYS[3]])[0].reason is not None, "what is over goes")
    wait_until(lambda: node.call(lambda one: bool(one.lookups._leases_over)), "the lease is over")
    whose = node.call(lambda one: next(iter(one.lookups._leases_over)))[0]
    node.call(lambda one: one.store.change_quotas({whose: 5 * 2 * PAGE}))
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[6:9]])

    def spoil(one: Node) -> None:
        (entry,) = one.store.lookup([(whose, KEYS[8])])
        assert entry is not None
        one.store.quarantine(whose, KEYS[8], entry.generation)

    node.call(spoil)
    with as_request("why"):
        client.exists(KEYS[:10])
    (lookup,) = told(node, "why")
    assert [outcome for run in lookup.runs for outcome in [run.outcome] * run.blocks] == [
        Outcome.QUOTA,
        Outcome.DELETED,
        Outcome.QUOTA,
        Outcome.EXPIRED,
        Outcome.LAYOUT,
        Outcome.LEASE_EXPIRED,
        Outcome.STORED,
        Outcome.STORED,
        Outcome.CORRUPT,
        Outcome.NEVER,
    ]
    assert all(
        run.gone_unix_ms >= now_ms
        for run in lookup.runs
        if run.outcome not in {Outcome.LAYOUT, Outcome.STORED, Outcome.NEVER}
    )
    with small_client(node.target, tenant="zeta") as zeta, as_request("theirs"):
        zeta.prefix(KEYS[6:7])
    assert [outcomes(one) for one in told(node, "theirs", "zeta")] == [[(1, Outcome.NEVER)]]
    assert told(node, "theirs") == told(node, "why", "zeta") == [], "a tenant sees its own"


def test_an_eviction_is_reported_with_its_time_and_idle_time(tmp_path: Path) -> None:
    with (
        NodeInProcess(tmp_path / "small", 16 << 20) as node,
        small_client(node.target, tenant="acme") as client,
    ):
        keys = [block_key(bytes([number]), b"large") for number in range(24)]
        for key in keys:
            client.put_inline(key, bytes(1 << 20))
        with as_request("old"):
            client.prefix(keys)
        (lookup,) = told(node, "old")
        (run,) = lookup.runs
        assert (run.outcome, run.blocks) == (Outcome.EVICTED, 1)
        assert run.gone_unix_ms > 0
        assert lookup.examined == 1 < lookup.blocks


def test_a_resume_is_one_request_of_its_session(node: NodeInProcess, client: Client) -> None:
    keys = [block_key(b"chat", number.to_bytes(2, "little")) for number in range(300)]
    client.put_many_inline([(key, bytes(PAGE)) for key in keys])
    chat = client.session("ada", "chat")
    chat.append(keys, 4800)
    client.session("ada", "other").append(keys[:1], 16)
    kv = client.register(allocate(300 * PAGE))
    assert chat.resume(lambda at, key: Block(key, kv, at * PAGE, PAGE), timeout_s=WAIT_S).is_whole
    found = told(node, user="ada", session="chat")
    assert (found[0].kind, outcomes(found[0])) == (Kind.SESSION, [(300, Outcome.NAMED)])
    assert {one.kind for one in found[1:]} == {Kind.FETCH}
    assert sorted(map(outcomes, found[1:])) == [[(blocks, Outcome.DRIVE)] for blocks in (44, 128, 128)]
    assert len({one.request_id for one in found}) == 1
    client.delete([keys[150]])
    back = chat.resume(lambda at, key: Block(key, kv, at * PAGE, PAGE), timeout_s=WAIT_S)
    assert back.usable_blocks == 150
    again = told(node, user="ada", session="chat")[4:]
    assert found[0].request_id not in {one.request_id for one in again}
    # Several gets are under way, and one may end before another.
    whole = [(22, Outcome.MEMORY), (1, Outcome.DELETED), (105, Outcome.MEMORY)]
    assert whole in [outcomes(one) for one in again]
    nothing = client.session("ada", "no such").resume(lambda _, key: Block(key, kv, 0, PAGE))
    assert nothing.miss is not None
    (lookup,) = told(node, user="ada", session="no such")
    assert outcomes(lookup) == [(1, Outcome.NO_SESSION)]


def test_an_abandoned_get_reports_the_blocks_that_had_not_arrived(
    node: NodeInProcess, client: Client
) -> None:
    client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:4]])
    kv = client.register(allocate(4 * PAGE))
    client.get([Block(KEYS[0], kv, 0, PAGE)], timeout_s=WAIT_S)
    held = HeldDrive(node)
    with as_request("slow"):
        client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:4])], timeout_s=1.5)
    wait_until(lambda: bool(told(node, "slow")), "the node has noticed that its caller is gone")
    held.release()
    wait_until(lambda: node.call(lambda one: not one.fetches._under_way), "nothing is under way")
    wait_until(lambda: not client._core.breaker.is_open, "the client tries again")
    with as_request("later"):
        client.exists(KEYS[:1])
    from_node, from_caller = sorted(told(node, "slow"), key=lambda one: one.by_caller)
    assert outcomes(from_node)[-1] == (3, Outcome.GIVEN_UP)
    assert (from_caller.by_caller, from_caller.blocks) == (True, 4)
    assert outcomes(from_caller)[-1] == (3, Outcome.NODE_AWAY)
    assert from_caller.took_us >= 300_000
    assert "did not arrive in time" in from_caller.detail


def test_blocks_delivered_before_a_client_left_count_as_sent(node: NodeInProcess) -> None:
    # The node's thread learns in batches which bytes were sent, and a client can leave before it does.
    held: list[Event] = []
    is_held = True
    reap = node.node.fabric.reap

    def reap_late() -> list[Event]:
        events = reap()
        if is_held:
            held.extend(event for event in events if event.kind in (EventKind.SENT, EventKind.READ))
            return [event for event in events if event not in held]
        events = held + events
        held.clear()
        return events

    with small_client(node.target, tenant="acme") as client:
        client.put_many_inline([(key, bytes(PAGE)) for key in KEYS[:4]])
        kv = client.register(allocate(4 * PAGE))
        node.call(lambda one: setattr(one.fabric, "reap", reap_late))
        with as_request("gone"):
            assert all(client.get([Block(key, kv, at * PAGE, PAGE) for at, key in enumerate(KEYS[:4])]))
        wait_until(lambda: bool(held), "they were sent")
        is_held = False
    wait_until(lambda: bool(told(node, "gone")), "the node knows that its caller is gone")
    assert [outcomes(one) for one in told(node, "gone")] == [[(4, Outcome.DRIVE)]]


def test_a_node_that_was_away_learns_afterwards_of_the_misses(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "node") as node:
        target = node.target
    with NodeInProcess(tmp_path / "other") as other, small_client(target, tenant="acme") as client:
        for number in range(LOOKUPS_WAITING_MAX + 8):
            with as_request(f"away-{number}"), pytest.raises(NodeUnavailable):
                client.prefix(KEYS[:5], timeout_s=5.0)
        assert len(client._core.lookups) == LOOKUPS_WAITING_MAX
        with small_client(other.target, tenant="acme") as reaches:
            reaches._core.lookups._waiting.extend(client._core.lookups._waiting)
            wait_until(
                lambda: reaches.prefix(KEYS[:5]).blocks == len(reaches._core.lookups),
                "all of it has been told",
            )
        lookups = [one for one in told(other) if one.by_caller]
    names = {one.request_id for one in lookups}
    assert names == {f"away-{number}" for number in range(8, LOOKUPS_WAITING_MAX + 8)}
    assert {(one.kind, tuple(one.runs)) for one in lookups} == {(Kind.PREFIX, (Run(5, Outcome.NODE_AWAY),))}


def test_reports_of_a_failed_call_are_sent_with_the_next(node: NodeInProcess, client: Client) -> None:
    client._core.lookups.lost("lost", Kind.FETCH, 0, [object()], NodeUnavailable("It was away."))

    def fail() -> None:
        with client._core.lookups.looking(Kind.PREFIX, 3, "failed"):
            assert len(client._core.lookups) == 0
            raise NodeUnavailable("Still.")

    def be_refused() -> None:
        with client._core.lookups.looking(Kind.PREFIX, 3, "refused"):
            raise Overloaded("Later.")

    with pytest.raises(NodeUnavailable, match="Still"):
        fail()
    with pytest.raises(Overloaded):
        be_refused()
    assert len(client._core.lookups) == 3
    client.exists(KEYS[:1])
    assert {one.request_id: outcomes(one) for one in told(node) if one.by_caller} == {
        "lost": [(1, Outcome.MEMORY)],
        "failed": [(3, Outcome.NODE_AWAY)],
        "refused": [(3, Outcome.BUSY)],
    }


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\xff" * 4000, b""])
def test_an_invalid_report_of_a_caller_is_ignored(node: NodeInProcess, client: Client, data: bytes) -> None:
    request = kvstore_pb2.GetRequest(
        tenant="acme",
        name=kvstore_pb2.BlockName(key=KEYS[0], fingerprint=layout_fingerprint(b""), length=PAGE),
    )
    more = ((REQUEST_HEADER, "x" * 999), (LOOKUPS_HEADER, data[:6000]))
    (answer,) = client._core.stub.Get(request, metadata=more, timeout=WAIT_S)
    assert answer.miss.reason == MissReason.UNKNOWN
    (lookup,) = told(node)
    assert lookup.request_id == "x" * LOOKUP_ID_BYTES_MAX


def test_runs_reported_with_too_many_blocks_are_recorded_with_the_most_that_fit() -> None:
    """The message has no room for their sum; an error would end the node."""
    run = pb.LookupRun(blocks=LOOKUP_BLOCKS_MAX, outcome=pb.LOOKUP_OUTCOME_STORED)
    reported = pb.LookupsByCaller(lookups=[pb.Lookup(runs=[run] * (LOOKUP_RUNS_MAX + 2))])
    lookups = Lookups(None, HeldClock())  # type: ignore[arg-type]
    lookups.begin(FabricHeaders(((LOOKUPS_HEADER, reported.SerializeToString()),)), bytes(16), Kind.PREFIX, 1)
    (lookup,) = lookups.listed(bytes(16), "", None, 0).lookups
    assert [one.blocks for one in lookup.runs] == [LOOKUP_BLOCKS_MAX] * LOOKUP_RUNS_MAX


def test_runs_are_bounded() -> None:
    alternating = bytes([Outcome.STORED, Outcome.NEVER] * 500)
    runs = runs_of(alternating)
    assert len(runs) == LOOKUP_RUNS_MAX
    assert sum(run.blocks for run in runs) == 1000
    assert runs[-1] == Run(1000 - LOOKUP_RUNS_MAX + 1, Outcome.UNSPECIFIED)
    assert runs_of(b"") == []
    just = alternating[: LOOKUP_RUNS_MAX - 1] + bytes([Outcome.MEMORY]) * 66_528
    assert runs_of(just)[-2:] == [Run(1, Outcome.STORED), Run(66_528, Outcome.MEMORY)]


def lookup_named(name: str, runs: Sequence[Run] = (Run(1, Outcome.STORED),)) -> Lookup:
    return Lookup(name, Kind.EXISTS, 7, 1, 1, runs)


def test_look_ups_of_the_tenant_with_the_most_are_dropped_first() -> None:
    lookups = Lookups(None, HeldClock())  # type: ignore[arg-type]
    greedy, modest, none = b"g" * 16, b"m" * 16, bytes(32)
    for number in range(10):
        lookups.record(modest, none, lookup_named(f"m{number}"))
    for number in range(2 * LOOKUPS_MAX):
        lookups.record(greedy, none, lookup_named(f"g{number}"))
        assert len(lookups) <= LOOKUPS_MAX
    assert lookups.listed(modest, "", None, 0).remembered == 10
    last = lookups.listed(greedy, "", None, 3).lookups
    assert [one.request_id for one in last] == [f"g{2 * LOOKUPS_MAX - 3 + at}" for at in range(3)]


def test_their_bytes_are_bounded() -> None:
    lookups = Lookups(None, HeldClock())  # type: ignore[arg-type]
    runs = [Run(1 + at, Outcome.EVICTED, 1 << 40, 1 << 30) for at in range(LOOKUP_RUNS_MAX)]
    size_bytes = lookup_message(lookup_named("x" * 128, runs)).ByteSize()
    for number in range(2 * LOOKUPS_BYTES_MAX // size_bytes):
        lookups.record(bytes(16), bytes(32), lookup_named("x" * 120 + str(number), runs))
        assert lookups._bytes <= LOOKUPS_BYTES_MAX
    assert lookups._bytes == sum(kept.size_bytes for kept in lookups._of[bytes(16)])
    assert 0 < len(lookups) < LOOKUPS_MAX
