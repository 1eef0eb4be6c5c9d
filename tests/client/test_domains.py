"""Blocks in erase domains: put over each path, separate per domain, and removed when their domain is erased."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

import grpc
import pytest

from kvstore.client import Block, Client, ClusterBlock, ClusterClient, Hit, Stored
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.errors import InvalidArgument, NotEncrypted, ProtocolError
from kvstore.miss import Miss, MissReason
from kvstore.names import (
    SHARED,
    block_key,
    domain_of,
    fits_domain,
    in_domain,
    is_in_domain,
    layout_fingerprint,
)
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.node("shared", encrypted=True)

SIZE = 20_000
ADA, GRACE = domain_of("ada"), domain_of("grace")


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(node.target, slots=16, block_bytes_max=1 << 20) as client:
        yield client


def payload(key: bytes) -> bytes:
    return key * (SIZE // len(key))


def put_over_fabric(client: Client, key: bytes, domain: bytes) -> None:
    with allocate(SIZE) as memory, client.register(memory) as region:
        memory[:SIZE] = payload(key)
        (result,) = client.put([Block(key, region, 0, SIZE, domain=domain)])
        assert result.error is None


def put_reserved(client: Client, key: bytes, domain: bytes, *, by_grpc: bool = False) -> None:
    client.attach()
    link = client._core.link
    assert link is not None
    calls, link.calls = link.calls, None if by_grpc else link.calls
    with allocate(SIZE) as memory, client.register(memory) as region, FlagWords.create(1) as flags:
        memory[:SIZE] = payload(key)
        puts = client.reserve([Block(key, region, 0, SIZE, domain=domain)]).arm(flags[0])
        flags[0].store(1)
        (result,) = puts.wait(10)
        assert result.error is None
    link.calls = calls


def put_reserved_by_grpc(client: Client, key: bytes, domain: bytes) -> None:
    put_reserved(client, key, domain, by_grpc=True)


def put_named_late(client: Client, key: bytes, domain: bytes) -> None:
    with allocate(SIZE) as memory, client.register(memory) as region, FlagWords.create(1) as flags:
        memory[:SIZE] = payload(key)
        puts = client.arm([Block(b"", region, 0, SIZE, domain=domain)], flags[0])
        other = in_domain(key, domain_of("somebody else"))
        with pytest.raises(InvalidArgument, match="domain"):
            puts.name(0, other)
        puts.name(0, key)
        flags[0].store(1)
        (result,) = puts.wait(10)
        assert result.error is None


def put_inline(client: Client, key: bytes, domain: bytes) -> None:
    client.put_inline(key, payload(key), domain=domain)


def put_in_a_stream(client: Client, key: bytes, domain: bytes) -> None:
    (result,) = client.put_many_inline([(key, payload(key))], domain=domain)
    assert result.error is None


def put_as_a_cluster(client: Client, key: bytes, domain: bytes) -> None:
    with ClusterClient([client.target]) as cluster:
        memory = bytearray(payload(key))
        region = cluster.register(memory)
        block = ClusterBlock(key, region, 0, SIZE, domain=domain)
        assert [one.error for one in cluster.put([block])] == [None]
        assert [one.error for one in cluster.put_many_inline([(key, memory)], domain=domain)] == [None]


PUTS = [
    put_over_fabric,
    put_reserved,
    put_reserved_by_grpc,
    put_named_late,
    put_inline,
    put_in_a_stream,
    put_as_a_cluster,
]


ABSENT = {MissReason.UNKNOWN, MissReason.ERASED}  # tests before may have erased the domain


def got(client: Client, key: bytes) -> bytes | MissReason:
    outcome = client.get_inline(key, SIZE)
    return outcome.reason if isinstance(outcome, Miss) else outcome


@pytest.mark.parametrize("put", PUTS)
def test_a_block_of_a_domain_is_erased_with_it_over_either_transport(
    client: Client, put: Callable[[Client, bytes, bytes], None]
) -> None:
    plain = block_key(put.__name__.encode())
    in_adas, in_graces = in_domain(plain, ADA), in_domain(plain, GRACE)
    for key, domain in ((plain, SHARED), (in_adas, ADA), (in_graces, GRACE)):
        put(client, key, domain)
    every = [plain, in_adas, in_graces]
    assert [got(client, key) for key in every] == [payload(key) for key in every]
    assert all(isinstance(one, Stored) for one in client.exists(every))
    with allocate(SIZE) as memory, client.register(memory) as region:
        assert client.get([Block(in_adas, region, 0, SIZE)]) == [Hit(in_adas)]
        assert bytes(memory[:SIZE]) == payload(in_adas)
    erased = client.erase_user("ada")
    assert (erased.blocks, erased.keys) == (1, 1)
    assert [got(client, key) for key in every] == [payload(plain), MissReason.ERASED, payload(in_graces)]
    assert client.erase_user("grace").blocks == 1
    assert [got(client, key) for key in every] == [payload(plain), MissReason.ERASED, MissReason.ERASED]
    put(client, in_adas, ADA)  # under another key
    assert got(client, in_adas) == payload(in_adas)
    assert client.erase_user("ada").blocks == 1


WRONG = [
    pytest.param(
        in_domain(block_key(b"1"), ADA), SHARED, "say which one", id="a key of a domain, without it"
    ),
    pytest.param(in_domain(block_key(b"1"), ADA), GRACE, "in_domain", id="a key of another domain"),
    pytest.param(block_key(b"1"), ADA, "in_domain", id="a key of no domain"),
]


@pytest.mark.parametrize(
    "put", [put_over_fabric, put_reserved, put_inline, put_in_a_stream, put_as_a_cluster]
)
@pytest.mark.parametrize(("key", "domain", "why"), WRONG)
def test_a_put_into_another_domain_than_its_keys_is_refused(
    client: Client, put: Callable[[Client, bytes, bytes], None], key: bytes, domain: bytes, why: str
) -> None:
    with pytest.raises(InvalidArgument, match=why):
        put(client, key, domain)
    assert got(client, key) in ABSENT


@pytest.mark.parametrize(("key", "domain", "_"), WRONG)
def test_the_node_refuses_a_put_into_another_domain_than_its_keys(
    client: Client, monkeypatch: pytest.MonkeyPatch, key: bytes, domain: bytes, _: str
) -> None:
    monkeypatch.setattr("kvstore.client.grpc_blocks.check_domain", lambda *_: None)
    monkeypatch.setattr("kvstore.client.checks._check_domains", lambda _: None)
    for put in (put_inline, put_in_a_stream, put_reserved, put_reserved_by_grpc):
        with pytest.raises((ProtocolError, AssertionError), match="domain"):
            put(client, key, domain)
        assert got(client, key) in ABSENT


def test_a_domain_has_sixteen_bytes(node: NodeProcess) -> None:
    with pytest.raises(InvalidArgument, match="16 bytes, not 3"):
        Block(block_key(b"1"), None, 0, SIZE, domain=b"ada")  # type: ignore[arg-type]
    name = pb.BlockName(key=block_key(b"1"), fingerprint=layout_fingerprint(), length=SIZE, domain=b"ada")
    with grpc.insecure_channel(node.target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        start = pb.PutRequest(start=pb.PutStart(name=name))
        with pytest.raises(grpc.RpcError, match="16 bytes, not 3"):
            stub.Put(iter([start]), timeout=10)


@pytest.mark.parametrize("put", [put_over_fabric, put_reserved, put_inline, put_in_a_stream])
def test_a_node_without_encryption_accepts_no_domain(
    tmp_path: Path, put: Callable[[Client, bytes, bytes], None]
) -> None:
    key = in_domain(block_key(b"plain"), ADA)
    with NodeProcess(tmp_path / "data", capacity="32MiB") as node, Client(node.target, slots=4) as client:
        with pytest.raises((NotEncrypted, AssertionError), match="--master-key"):
            put(client, key, ADA)
        assert got(client, key) in ABSENT


def test_a_lane_without_encryption_writes_no_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.client.fabric_transport._refuse_domains", lambda *_: None)
    key = in_domain(block_key(b"plain"), ADA)
    with NodeProcess(tmp_path / "data", capacity="32MiB") as node, Client(node.target, slots=4) as client:
        put_over_fabric(client, block_key(b"first"), SHARED)
        with allocate(SIZE) as memory, client.register(memory) as region:
            (result,) = client.put([Block(key, region, 0, SIZE, domain=ADA)])
        assert isinstance(result.error, NotEncrypted)
        assert got(client, key) in ABSENT


def test_no_block_of_a_domain_is_acknowledged_in_the_clear(tmp_path: Path) -> None:
    key = in_domain(block_key(b"plain"), ADA)
    with NodeProcess(tmp_path / "data", capacity="32MiB") as node, Client(node.target, slots=4) as client:
        with (
            allocate(SIZE) as memory,
            client.register(memory) as region,
            pytest.raises(NotEncrypted, match="--master-key"),
        ):
            client.put([Block(key, region, 0, SIZE, domain=ADA)], durability=Durability.LANDED)
        assert got(client, key) in ABSENT


@pytest.mark.parametrize("shared", [True, False])
def test_a_session_is_imported_into_its_users_domain(
    node: NodeProcess, client: Client, *, shared: bool
) -> None:
    keys = [in_domain(block_key(b"exported"), ADA), block_key(b"exported, shared")]
    put_inline(client, keys[0], ADA)
    put_inline(client, keys[1], SHARED)
    session = client.session("ada", "exported")
    session.append(keys, tokens=2)
    file = BytesIO()
    assert session.export(file) == 2
    file.seek(0)
    with Client(node.target, shared=shared) as importer:
        own = importer.import_session(file, "grace", "imported").keys()
    assert own == [in_domain(keys[0], GRACE), keys[1] if shared else in_domain(keys[1], GRACE)]
    assert client.erase_user("ada").blocks == (1 if shared else 2), "another session names the shared one"
    assert [got(client, key) for key in own] == [payload(keys[0]), payload(keys[1])]
    assert got(client, keys[0]) is MissReason.ERASED
    assert client.erase_user("grace").blocks == 2
    assert got(client, own[0]) is MissReason.ERASED


def test_a_cluster_does_not_repair_a_block_of_a_domain(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ClusterClient([client.target]) as cluster:
        added: list[bytes] = []
        monkeypatch.setattr(cluster._repairs, "add", lambda _, __, key, *___: added.append(key))
        for key in (in_domain(block_key(b"back"), ADA), block_key(b"back")):
            cluster._reads._put_back([client.target], client.target, key, 0, lambda: b"its bytes")
        assert added == [block_key(b"back")]


def test_keys_made_for_a_domain_show_it_and_match_no_other() -> None:
    keys = [block_key(bytes([number])) for number in range(100)]
    for key in keys:
        one = in_domain(key, ADA)
        assert len(one) == len(key)
        assert is_in_domain(one)
        assert not is_in_domain(key)
        assert fits_domain(one, ADA)
        assert not fits_domain(one, GRACE)
        assert not fits_domain(one, SHARED)
        assert fits_domain(key, SHARED)
        assert not fits_domain(key, ADA)
    for domain in (ADA, GRACE):
        assert len({in_domain(key, domain) for key in keys}) == len(keys)
    assert not {in_domain(key, ADA) for key in keys} & {in_domain(key, GRACE) for key in keys}
