"""Copies that nodes make by themselves, on a real etcd: what they repair, and what they never bring back."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest

from kvstore.client import Client, ClusterClient, Nodes
from kvstore.client.block_calls import BlockCalls, Deleted, Stored
from kvstore.client.blocks import fingerprint_of
from kvstore.clock import SystemClock
from kvstore.cluster.etcd import Etcd
from kvstore.cluster.etcd_options import EtcdReach
from kvstore.cluster.map import DRAINING, Map, Member
from kvstore.errors import Closed, KvError, NodeUnavailable, TenantDenied
from kvstore.limits import UPKEEP_ASKED_BLOCKS, UPKEEP_WAITED_BLOCKS_MAX, UPKEEP_WAITED_MS
from kvstore.names import SHARED, block_key
from kvstore.node.copy_eligibility import CopyEligibility
from kvstore.node.peers import Peers
from kvstore.node.tenants import token_digest
from kvstore.node.upkeep import Block, ByteRate, Upkeep, lacking
from kvstore.node.upkeep_service import Waited
from kvstore.reach import token_of
from kvstore.storage.index import Entry
from kvstore.wire import cluster_pb2, cluster_pb2_grpc, kvstore_pb2, upkeep_pb2_grpc
from kvstore.wire import upkeep_pb2 as pb
from nic_offload.checksum import crc32c
from tests.cluster.real_etcd import RealEtcd
from tests.cluster.reports import have_scanned
from tests.cluster.simulated import run
from tests.commands.here import run_here
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES, WAIT_S = 40, 6000, 20.0


class RealCluster:
    """One etcd, nodes that keep two copies, and a client that keeps two as well."""

    def __init__(
        self, folder: Path, stack: ExitStack, count: int, arguments: Sequence[str] = (), **more: Any
    ) -> None:
        self.folder, self._stack, self._arguments = folder, stack, arguments
        self.etcd = stack.enter_context(RealEtcd(folder / "etcd"))
        self.nodes: list[NodeProcess] = []
        for number in range(count):
            self.add(folder / f"node{number}")
        more = {"slots": 16, "block_bytes_max": 1 << 20, "call_timeout_ms": 3_000} | more
        targets = [node.target for node in self.nodes]
        self.client = stack.enter_context(ClusterClient(targets, replicas=2, **more))
        self.settled()

    def add(self, data: Path) -> NodeProcess:
        told = ("--cluster", f"{self.etcd.endpoints[0]}/test", "--cluster-replicas", "2", *self._arguments)
        node = self._stack.enter_context(small_node(data, arguments=told))
        self.nodes.append(node)
        return node

    def settled(self) -> None:
        """Whether each node and the client have exactly these nodes on their maps."""
        wanted = {node.target for node in self.nodes}
        wait_until(lambda: {one.node for one in self.client.nodes.map.members} == wanted, "the map", WAIT_S)
        token = token_of(self.client.nodes.reach)
        for node in self.nodes:
            wait_until(
                lambda node=node: {one.node for one in told(node, token).members} == wanted,  # type: ignore[misc]
                "a node's map",
                WAIT_S,
            )

    def there(self, node: NodeProcess, keys: list[bytes]) -> list[bool]:
        return [isinstance(one, Stored) for one in self.client.nodes.at(node.target).exists(keys)]

    def is_reached(self, node: NodeProcess) -> bool:
        try:
            self.there(node, [one_key()])
        except KvError:
            return False
        return True

    def on_two(self, keys: list[bytes]) -> bool:
        """Whether every owner of each block has it."""
        has = {node.target: self.there(node, keys) for node in self.nodes}
        return all(has[owner][at] for at, key in enumerate(keys) for owner in self.client.owners(key))

    def put(self, count: int = COUNT, **more: Any) -> list[bytes]:
        name = secrets.token_bytes(8)
        keys = [block_key(name, number.to_bytes(2)) for number in range(count)]
        results = self.client.put_many_inline(((key, data(key)) for key in keys), **more)
        assert {one.error for one in results} == {None}
        return keys

    def put_one_copy(self, count: int) -> list[bytes]:
        """Put blocks on the first node only."""
        node = self.nodes[0]
        keys = [one_key() for _ in range(count)]
        pages = [(key, data(key)) for key in keys]
        assert {one.error for one in self.client.nodes.at(node.target).put_many_inline(pages)} == {None}
        return keys

    def leases(self) -> dict[str, tuple[str, int]]:
        """The names and leases in etcd, by address."""

        async def ask() -> dict[str, tuple[str, int]]:
            etcd = Etcd(EtcdReach(self.etcd.endpoints, "test"))
            listed = await etcd.listed(b"/triggerkv/test/members/")
            await etcd.close()
            members = [(Member.decoded(value), lease) for value, lease in listed.values.values()]
            return {one.node: (one.name, lease) for one, lease in members}

        return asyncio.run(ask())

    def stranger(self, receiver: NodeProcess, sender: NodeProcess) -> Stranger:
        """A caller that presents itself as the sender, once the receiver's map has the sender's current lease."""
        strangers: list[Stranger] = []

        def is_known() -> bool:
            strangers.append(Stranger(receiver, *self.leases()[sender.target]))
            return strangers[-1].offer([one_key()], surely=False).refused == ""

        wait_until(is_known, "the receiver knows the sender", WAIT_S)
        return strangers[-1]


class Stranger(NamedTuple):
    """Calls a node as another node does."""

    node: NodeProcess
    name: str
    lease: int
    tenant: str = "default"
    token: str | None = None

    def _call(self, method: str, request: Any) -> Any:
        metadata = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        with grpc.insecure_channel(self.node.target) as channel:
            stub = upkeep_pb2_grpc.UpkeepStub(channel)  # type: ignore[no-untyped-call]
            return getattr(stub, method)(request, timeout=WAIT_S, metadata=metadata)

    def offer(self, keys: Sequence[bytes], *, surely: bool = True, length: int = 0) -> pb.OfferResponse:
        blocks = [pb.OfferedBlock(key=key, length=length or len(data(key)), surely=surely) for key in keys]
        request = pb.OfferRequest(node=self.name, lease=self.lease, tenant=self.tenant, blocks=blocks)
        answer: pb.OfferResponse = self._call("Offer", request)
        return answer

    def copy(self, key: bytes, ticket: int, crc: int | None = None, domain: bytes = SHARED) -> bool:
        name = kvstore_pb2.BlockName(
            key=key, fingerprint=fingerprint_of(b""), length=len(data(key)), domain=domain
        )
        start = pb.CopyStart(
            ticket=ticket, tenant=self.tenant, name=name, crc32c=crc32c(data(key)) if crc is None else crc
        )
        messages = [pb.CopyRequest(start=start), pb.CopyRequest(chunk=data(key))]
        answer: pb.CopyResponse = self._call("Copy", iter(messages))
        return answer.kept


def told(node: NodeProcess, token: str | None = None) -> cluster_pb2.MapResponse:
    """A node's report on itself and the cluster."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    with grpc.insecure_channel(node.target) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Map(cluster_pb2.MapRequest(places_by_lots=True), timeout=WAIT_S, metadata=metadata)
        answer: cluster_pb2.MapResponse = next(call)
        call.cancel()
        return answer


def data(key: bytes) -> bytes:
    return key * (BYTES // len(key))


def has_looked(node: NodeProcess, one_copy: int) -> bool:
    report = told(node)
    return have_scanned([report]) and report.upkeep.one_copy == one_copy


def test_after_a_loss_and_a_join_everything_is_on_two_nodes_again_without_reads(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        ends_ms = int(time.time_ns() // 1_000_000) + 3_600_000
        keys = world.put(expires_unix_ms=ends_ms)
        lost = world.nodes.pop(1)
        assert any(not all(world.there(node, keys)) for node in world.nodes)
        lost.stop()
        world.settled()
        wait_until(lambda: world.on_two(keys), "each is on both that are left", WAIT_S)
        for node in world.nodes:
            client = world.client.nodes.at(node.target)
            wanted = [(key, len(data(key))) for key in keys]
            assert list(client.get_many_inline(wanted)) == [data(key) for key in keys]
            ends = {one.expires_unix_ms for one in client.exists(keys) if isinstance(one, Stored)}
            assert ends == {ends_ms}
            wait_until(lambda node=node: has_looked(node, 0), "it says so", WAIT_S)  # type: ignore[misc]
        assert sum(told(node).upkeep.copied_blocks for node in world.nodes) < COUNT, "each once"
        empty = world.add(world.folder / "replaced")
        world.settled()
        wait_until(lambda: world.on_two(keys), "the new one has what it owns", WAIT_S)
        assert COUNT // 3 < sum(world.there(empty, keys)) < COUNT


def test_a_returned_node_gives_back_blocks_except_those_deleted_meanwhile(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 2)
        keys = world.put()
        away, stays = world.nodes
        away.stop()
        world.nodes = [stays]
        world.settled()
        # As a client of an earlier version does it, or when it was forgotten: the cluster's own asks who is absent.
        assert world.client.nodes.at(stays.target).delete(keys[:10]) == [True] * 10
        away.start()
        world.nodes = [away, stays]
        world.settled()
        firsts = [key for key in keys[:10] if world.client.owners(key)[0] == away.target]
        wait_until(lambda: told(away).upkeep.unsure == 10, "it has looked at what it is not sure of", WAIT_S)
        assert 0 < len(firsts) < 10
        assert not any(world.there(stays, keys[:10]))
        stays.stop()  # what it has said of the others still counts
        world.nodes = [away]
        world.settled()
        world.add(world.folder / "replaced")
        world.settled()
        wait_until(lambda: world.on_two(keys[10:]), "the others are on two", WAIT_S)
        assert not any(world.there(world.nodes[1], keys[:10]))


def test_a_client_reads_draining_nodes_last(pair: RealCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (late,) = pair.put_one_copy(1)
    first, second = sorted(pair.client.nodes.map.members, key=lambda one: one.node != pair.nodes[0].target)
    drains = Member(first.name, first.node, first.weight, state=DRAINING)
    monkeypatch.setattr(type(pair.client.nodes), "map", Map.of(1, [drains, second]))
    assert pair.client.owners(late) == [second.node, first.node]
    assert pair.client.get_inline(late, len(data(late))) == data(late)


def test_draining_members_are_owners_if_nobody_else_is_left() -> None:
    members = [Member(name, f"{name}:1") for name in ("a", "b", "c")]
    whole = Map.of(1, members)
    part = Map.of(2, [Member("a", "a:1", state=DRAINING), *members[1:]])
    keys = [one_key() for _ in range(200)]
    for key in keys:
        without = [at for at in whole.owners(b"", key) if at != 0]
        assert list(part.owners(b"", key)) == [*without, 0], "and nothing else moves"
    assert part.shares()[0] == 0
    assert sum(part.shares()) == pytest.approx(1)
    gone = Map.of(3, [Member(one.name, one.node, state=DRAINING) for one in members])
    assert [gone.owners(b"", key) for key in keys] == [whole.owners(b"", key) for key in keys]
    assert Member.decoded(b'{"name":"a","node":"a:1","weight":1,"version":""}') == members[0], (
        "an earlier version's"
    )


def command(*said: str) -> subprocess.CompletedProcess[str]:
    return run_here("cluster", *said)


@pytest.fixture(scope="module")
def pair(module_folder: Path) -> Iterator[RealCluster]:
    with ExitStack() as stack:
        yield RealCluster(module_folder, stack, 2)


@pytest.fixture
def other(pair: RealCluster) -> Stranger:
    """A caller that presents itself to the second node as the first."""
    return pair.stranger(pair.nodes[1], pair.nodes[0])


def one_key() -> bytes:
    return block_key(secrets.token_bytes(8))


def test_a_block_deleted_after_it_was_offered_is_refused(pair: RealCluster, other: Stranger) -> None:
    keys = [one_key() for _ in range(3)]
    answer = other.offer(keys)
    assert list(answer.blocks) == [pb.OFFERED_WANTED] * 3
    assert pair.client.delete(keys[:1]) == [False]
    assert [other.copy(key, answer.ticket) for key in keys] == [False, True, True]
    assert pair.there(other.node, keys) == [False, True, True]
    assert not other.copy(keys[1], answer.ticket), "it is waited for once"
    assert list(other.offer(keys).blocks)[1:] == [pb.OFFERED_STORED_SURELY] * 2


def test_a_copy_needs_the_latest_offer_of_its_block(pair: RealCluster, other: Stranger) -> None:
    first, second = one_key(), one_key()
    early = other.offer([first])
    late = other.offer([first])
    assert not other.copy(second, late.ticket)
    assert not other.copy(first, early.ticket)
    assert other.copy(first, late.ticket)
    asked = other.offer([second], surely=False)
    assert list(asked.blocks) == [pb.OFFERED_MISSING]
    assert not other.copy(second, asked.ticket)
    assert pair.there(other.node, [first, second]) == [True, False]


def test_a_node_that_is_not_on_the_map_under_its_lease_is_refused(other: Stranger) -> None:
    for stranger in (
        other._replace(lease=other.lease + 1),
        other._replace(name="nobody"),
        other._replace(lease=0),
    ):
        answer = stranger.offer([one_key()])
        assert answer.refused == "The offering node is not on this node's map."
        assert not answer.blocks


def test_other_bytes_than_were_put_are_refused(pair: RealCluster, other: Stranger) -> None:
    key = one_key()
    answer = other.offer([key])
    with pytest.raises(grpc.RpcError, match="do not match its block"):
        other.copy(key, answer.ticket, crc=crc32c(data(key)) ^ 1)
    assert pair.there(other.node, [key]) == [False]


def test_copies_are_refused_when_little_room_is_left(other: Stranger) -> None:
    assert list(other.offer([one_key()], length=63 << 20).blocks) == [pb.OFFERED_FULL]
    many = other.offer([one_key() for _ in range(70)], length=1 << 20)
    assert {pb.OFFERED_WANTED, pb.OFFERED_FULL} == set(many.blocks)
    assert list(many.blocks).count(pb.OFFERED_WANTED) < 63, "what it waits for takes room as well"


def test_a_deletion_is_sent_twice_and_not_acknowledged_if_maps_differ(
    pair: RealCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = pair.put(1)
    passes: list[set[int]] = []
    delete = BlockCalls.delete_detailed

    def noted(self: BlockCalls, *keys: Any, **more: Any) -> Deleted:
        answer = delete(self, *keys, **more)
        passes.append(answer.digests)
        return answer

    monkeypatch.setattr(BlockCalls, "delete_detailed", noted)
    now = pair.client.nodes.map
    assert pair.client.delete([key]) == [True]
    assert passes == [{now.digest}] * 4, "two nodes, twice"
    monkeypatch.setattr(type(pair.client.nodes), "map", Map.of(now.revision, now.members, now.digest ^ 1))
    with pytest.raises(NodeUnavailable, match="Repeat the call"):
        pair.client.delete([key])


def test_with_tenants_a_node_makes_copies_and_a_tenant_does_not(tmp_path: Path) -> None:
    tokens = {name: secrets.token_urlsafe() for name in ("acme", "small")}
    (tmp_path / "tenants.toml").write_text(
        f'[acme]\ntokens_sha256 = ["{token_digest(tokens["acme"])}"]\n'
        f'[small]\ntokens_sha256 = ["{token_digest(tokens["small"])}"]\nbytes = 30_000\n'
    )
    secret = secrets.token_urlsafe(32)
    (tmp_path / "secret").write_text(secret)
    more = ("--tenants", str(tmp_path / "tenants.toml"), "--cluster-secret", str(tmp_path / "secret"))
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 1, more, token=tokens["acme"])
        (node,) = world.nodes
        name, lease = world.leases()[node.target]
        as_node = Stranger(node, name, lease, "acme", secret)
        for token in (tokens["acme"], None, "a guess"):
            with pytest.raises(grpc.RpcError) as refused:
                as_node._replace(token=token).offer([one_key()])
            wanted = (
                grpc.StatusCode.PERMISSION_DENIED
                if token == tokens["acme"]
                else grpc.StatusCode.UNAUTHENTICATED
            )
            assert refused.value.code() is wanted
            assert token != tokens["acme"] or "needs the secret of the cluster's nodes" in str(refused.value)
        key = one_key()
        answer = as_node.offer([key])
        assert as_node.copy(key, answer.ticket)
        assert world.client.get_inline(key, len(data(key))) == data(key), "it is the tenant's"
        with pytest.raises(grpc.RpcError, match="no tenant 'nobody'"):
            as_node._replace(tenant="nobody").offer([one_key()])
        small = as_node._replace(tenant="small")
        assert (
            list(small.offer([one_key() for _ in range(4)]).blocks)
            == [pb.OFFERED_WANTED] * 2 + [pb.OFFERED_FULL] * 2
        )
        with Client(node.target, token=secret) as client:
            for call in (
                lambda: client.get_inline(key, len(data(key))),
                lambda: client.put_inline(one_key(), b"bytes"),
                lambda: client.delete([key]),
                lambda: client.exists([key]),
            ):
                with pytest.raises(TenantDenied, match="give a tenant's token"):
                    call()
        # It is asked for by its owner's name, too: one more node, and all that are there are copied to it.
        keys = world.put_one_copy(COUNT)
        world.add(tmp_path / "second")
        world.settled()
        wait_until(lambda: world.on_two(keys), "they are copied as its tenant's", WAIT_S)


def test_clients_of_one_tenant_have_the_same_owners_whether_they_name_it_or_not(pair: RealCluster) -> None:
    keys = [one_key() for _ in range(64)]
    with ClusterClient([pair.nodes[0].target], tenant="default") as named:
        assert [named.owners(key) for key in keys] == [pair.client.owners(key) for key in keys]


def test_the_client_of_a_node_that_left_long_ago_is_closed(
    pair: RealCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.nodes.CLUSTER_LEFT_MS", 300)
    with Nodes([node.target for node in pair.nodes]) as nodes:
        whole, first = nodes.map, nodes.reach.nodes[0]
        stays, leaves = sorted(whole.members, key=lambda one: one.node != first)
        clients = [nodes.at(one.node) for one in (stays, leaves)]
        monkeypatch.setattr(
            nodes, "_following", SimpleNamespace(map=Map.of(9, [stays]), close=nodes._following.close)
        )
        assert nodes.map.members == (stays,)
        clients[1].exists([one_key()])
        time.sleep(0.4)
        assert nodes.map.members == (stays,)
        with pytest.raises(Closed):
            clients[1].exists([one_key()])
        clients[0].exists([one_key()])
        monkeypatch.setattr(nodes, "_following", SimpleNamespace(map=whole, close=nodes._following.close))
        nodes.at(leaves.node).exists([one_key()])


# --- by themselves


def test_a_node_unaware_that_it_is_off_the_map_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upkeep = Upkeep.__new__(Upkeep)
    block = Block((b"tenant", b"key"), "acme", Entry(0, 1, 0, 1, 0, b""), (0, 1), is_sure=False)
    membership = SimpleNamespace(name="a", lease=1, lease_of={"b": 7})
    said = 0

    async def offer(*_: object, **__: object) -> pb.OfferResponse:
        return pb.OfferResponse(lease=said, ticket=3, blocks=[pb.OFFERED_STORED_SURELY])

    monkeypatch.setattr(upkeep, "_membership", membership, raising=False)
    monkeypatch.setattr(upkeep, "_peers", SimpleNamespace(metadata=()), raising=False)
    monkeypatch.setattr(upkeep, "_stub", lambda _: SimpleNamespace(Offer=offer), raising=False)
    for lease, believed in (
        (7, pb.OFFERED_STORED_SURELY),
        (6, pb.OFFERED_UNSPECIFIED),
        (0, pb.OFFERED_UNSPECIFIED),
    ):
        said = lease
        _, told = asyncio.run(upkeep._ask("b", "acme", [block]))
        assert list(told) == [believed]


@pytest.mark.parametrize(
    ("me", "first", "second", "copies_to", "if_draining"),
    [
        (0, None, pb.OFFERED_STORED, [], []),
        (0, None, pb.OFFERED_MISSING, [1], [1]),
        (1, pb.OFFERED_STORED, None, [], []),
        (1, pb.OFFERED_MISSING, None, [0], [0]),
        (2, pb.OFFERED_STORED_SURELY, pb.OFFERED_MISSING, [], [1]),
        (2, pb.OFFERED_STORED, pb.OFFERED_MISSING, [1], [1]),
        (2, pb.OFFERED_MISSING, pb.OFFERED_STORED_SURELY, [], [0]),
        (2, pb.OFFERED_MISSING, pb.OFFERED_STORED, [0], [0]),
        (2, pb.OFFERED_MISSING, pb.OFFERED_MISSING, [0, 1], [0, 1]),
        (2, pb.OFFERED_STORED, pb.OFFERED_STORED, [], []),
    ],
)
def test_an_owner_leaves_a_block_to_an_earlier_one(
    me: int, first: int | None, second: int | None, copies_to: list[int], if_draining: list[int]
) -> None:
    name = b"tenant", b"key"
    block = Block(name, "acme", Entry(0, 1, 0, 1, 0, b""), (0, 1), is_sure=True)
    has = {(at, name): said for at, said in enumerate((first, second)) if said is not None}
    assert lacking(me, block, has, is_draining=False) == copies_to
    assert lacking(me, block, has, is_draining=True) == if_draining


class Drive:
    """The part of a drive that `CopyEligibility` uses."""

    number, last_generation, seals = 0, 10, 0

    def seal(self) -> int:
        self.seals += 1
        return self.last_generation


def test_a_block_is_sure_if_it_arrived_under_the_lease_or_was_confirmed_by_a_sure_node() -> None:
    drive, lease = Drive(), [0]
    eligibility = CopyEligibility([drive], lambda: lease[0])  # type: ignore[list-item]

    def is_sure(generation: int) -> bool:
        return eligibility.is_sure(drive, generation)  # type: ignore[arg-type]

    eligibility.note_copy(5)
    assert not any(map(is_sure, range(20))), "it is not on the map"
    lease[0] = 7
    assert [one for one in range(20) if is_sure(one)] == list(range(11, 20))
    assert drive.seals == 1
    eligibility.note_copy(5)
    assert is_sure(5)
    eligibility.end_scan()
    assert is_sure(5)
    eligibility.end_scan()
    eligibility.end_scan()
    assert not is_sure(5), "it was not met any more"
    drive.last_generation = 15
    eligibility.note_copy(5)
    lease[0] = 8
    assert [one for one in range(20) if is_sure(one)] == list(range(16, 20)), "all begins anew"
    lease[0] = 0
    assert not any(map(is_sure, range(20)))


def test_waits_are_bounded_in_number_and_time() -> None:
    class Clock(SystemClock):
        now_ms = 0

        def monotonic_ns(self) -> int:
            return self.now_ms * 1_000_000

    clock = Clock()
    waited = Waited(clock)
    for number in range(UPKEEP_WAITED_BLOCKS_MAX - UPKEEP_ASKED_BLOCKS):
        waited.add((b"tenant", number.to_bytes(4)), 1, 8192)
    assert waited.has_room
    waited.add((b"tenant", b"one more"), 1, 8192)
    assert not waited.has_room
    assert waited.size_bytes == len(waited) * 8192
    clock.now_ms = UPKEEP_WAITED_MS
    assert waited.has_room
    assert (len(waited), waited.size_bytes, waited.size_bytes_of) == (0, 0, {})


def test_the_rate_of_copies_is_bounded() -> None:
    async def doing() -> None:
        loop = asyncio.get_running_loop()
        pace, began_s = ByteRate(1000), loop.time()
        await asyncio.gather(*(pace.wait(500) for _ in range(8)))
        assert loop.time() - began_s == pytest.approx(4)
        await asyncio.sleep(60)
        began_s = loop.time()
        for _ in range(4):
            await pace.wait(500)
        assert loop.time() - began_s == pytest.approx(2), "nothing was saved up"

    run(doing())


def test_a_call_under_way_to_a_node_that_leaves_gets_its_answer() -> None:
    """Else its caller, often a task without end, would be cancelled."""

    async def doing() -> None:
        called, answers = asyncio.Event(), asyncio.Event()

        class Leaving(upkeep_pb2_grpc.UpkeepServicer):
            async def TakeSessions(self, *_: object) -> pb.TakeSessionsResponse:  # noqa: N802
                called.set()
                await answers.wait()
                return pb.TakeSessionsResponse(refused="It leaves.")

        server = grpc.aio.server()
        upkeep_pb2_grpc.add_UpkeepServicer_to_server(Leaving(), server)  # type: ignore[no-untyped-call]
        node = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        peers = Peers(None, None)
        try:
            call = peers.stub(node).TakeSessions(pb.TakeSessionsRequest(), timeout=WAIT_S)
            await called.wait()
            peers.keep(())
            (closing,) = peers._closing
            await asyncio.sleep(0)
            answers.set()
            assert (await call).refused == "It leaves."
            await closing
        finally:
            await peers.close()
            await server.stop(None)

    asyncio.run(doing())
