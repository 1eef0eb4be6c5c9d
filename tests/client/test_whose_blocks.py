"""The owner of a put block: on a node that encrypts, nothing is shared unless requested, on any path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest

from kvcli.running import Status
from kvstore.cli import main
from kvstore.client import Block, Client, ClusterClient, Reach
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.errors import ConfigError, DomainRequired, InvalidArgument
from kvstore.miss import MissReason
from kvstore.names import SHARED, UNSAID, block_key, domain_of, in_domain, user_name
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.client.test_domains import (
    ABSENT,
    ADA,
    PUTS,
    SIZE,
    got,
    payload,
    put_in_a_stream,
    put_inline,
    put_over_fabric,
    put_reserved,
    put_reserved_by_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Put = Callable[[Client, bytes, bytes], None]

pytestmark = pytest.mark.node("shared", encrypted=True)

ON_ITS_OWN = [put_over_fabric, put_reserved, put_reserved_by_grpc, put_inline, put_in_a_stream]
NEEDED = "name the block's user .* or ask for SHARED"


@pytest.fixture(scope="module")
def plain_node(module_folder: Path) -> Iterator[NodeProcess]:
    with NodeProcess(module_folder / "plain", capacity="64MiB") as running:
        yield running


@pytest.fixture
def client(node: NodeProcess) -> Iterator[Client]:
    with Client(node.target, slots=4, block_bytes_max=1 << 20) as client:
        yield client


@pytest.mark.parametrize("put", ON_ITS_OWN)
def test_a_node_that_encrypts_refuses_a_put_without_an_owner(
    client: Client, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = block_key(b"whose", put.__name__.encode())
    for refuses in ("the client, where it knows", "the node"):
        with pytest.raises((DomainRequired, AssertionError), match=f"DomainRequired|{NEEDED}"):
            put(client, key, UNSAID)
        assert got(client, key) is MissReason.UNKNOWN, refuses
        monkeypatch.setattr("kvstore.client.fabric_transport._refuse_domains", lambda *_: None)
    put(client, key, SHARED)
    assert got(client, key) == payload(key)
    with pytest.raises((DomainRequired, AssertionError), match=f"DomainRequired|{NEEDED}"):
        put(client, key, UNSAID)  # though it is stored


@pytest.mark.parametrize("durability", list(Durability))
def test_the_nodes_core_refuses_it_for_every_durability(
    client: Client, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.client.fabric_transport._refuse_domains", lambda *_: None)
    key = block_key(b"granted", durability.name.encode())
    failed = client.statistics().puts_failed
    with allocate(SIZE) as memory, client.register(memory) as region:
        (result,) = client.put([Block(key, region, 0, SIZE)], durability=durability)
    assert isinstance(result.error, DomainRequired)
    assert result.durability is None
    assert got(client, key) is MissReason.UNKNOWN
    put_over_fabric(client, key, SHARED)  # with which its node hears of the one before
    assert got(client, key) == payload(key)
    assert client.statistics().puts_failed == failed + 1


def test_a_client_that_knows_no_domains_is_refused_and_its_blocks_are_not_shared(
    node: NodeProcess, client: Client
) -> None:
    """As an earlier build sends it: a name of three fields."""
    key = block_key(b"of an earlier build")
    name = pb.BlockName(key=key, fingerprint=client.fingerprint, length=4)
    with grpc.insecure_channel(node.target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        parts = [pb.PutRequest(start=pb.PutStart(name=name)), pb.PutRequest(chunk=b"KV! ")]
        with pytest.raises(grpc.RpcError, match=NEEDED) as refused:
            stub.Put(iter(parts), timeout=10)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        parts[0].start.name.domain = bytes(16)
        with pytest.raises(grpc.RpcError, match="zeros"):
            stub.Put(iter(parts), timeout=10)
        parts[0].start.name.domain = b"shared by tenant"  # as the page of the protocol has it
        stub.Put(iter(parts), timeout=10)
    assert client.get_inline(key, 4) == b"KV! "


def test_only_blocks_of_a_stream_without_a_domain_are_refused(client: Client) -> None:
    keys = [block_key(b"stream", bytes([number])) for number in range(3)]
    results = client.put_many_inline([(key, payload(key)) for key in keys])
    assert [type(one.error) for one in results] == [DomainRequired] * 3
    assert [got(client, key) for key in keys] == [MissReason.UNKNOWN] * 3


@pytest.mark.parametrize("put", PUTS)
def test_a_node_without_encryption_requires_no_owner(plain_node: NodeProcess, put: Put) -> None:
    with Client(plain_node.target, slots=4, block_bytes_max=1 << 20) as client:
        for domain in (UNSAID, SHARED):
            key = block_key(b"plain", put.__name__.encode(), domain)
            put(client, key, domain)
            assert got(client, key) == payload(key)


@pytest.mark.parametrize("put", PUTS)
def test_the_client_states_once_who_owns_all_its_puts(node: NodeProcess, put: Put) -> None:
    plain = block_key(b"default", put.__name__.encode())
    own = in_domain(plain, ADA)
    with Client(Reach.of({"node": node.target, "user": "ada"}), slots=4, block_bytes_max=1 << 20) as client:
        if put.__name__ != "put_as_a_cluster":  # which has a client of its own
            put(client, own, UNSAID)
            if put.__name__ != "put_named_late":  # test_a_block_named_late_... has that
                with pytest.raises(InvalidArgument, match="in_domain"):
                    put(client, plain, UNSAID)
                assert got(client, plain) in ABSENT
            assert client.erase_user("ada").blocks == 1
            assert got(client, own) is MissReason.ERASED
        put(client, plain, SHARED)
        assert got(client, plain) == payload(plain)
        assert client.erase_user("ada").blocks == 0, "what was asked to be shared stays"
        assert got(client, plain) == payload(plain)


def test_cluster_and_shared_clients_state_it_too(node: NodeProcess) -> None:
    plain = block_key(b"of a cluster")
    own = in_domain(plain, ADA)
    with ClusterClient([node.target], user="ada") as cluster:
        memory = bytearray(payload(own))
        assert [one.error for one in cluster.put_many_inline([(own, memory)])] == [None]
        (erased,) = cluster.erase_user("ada")
        assert erased.blocks == 1
    with Client(node.target, shared=True) as client:
        for put in ON_ITS_OWN:
            key = block_key(put.__name__.encode(), b"shared by the client")
            put(client, key, UNSAID)
            assert got(client, key) == payload(key)
        with pytest.raises(InvalidArgument, match="say which one"):
            put_inline(client, in_domain(plain, ADA), UNSAID)


def test_a_sessions_blocks_belong_to_its_user(client: Client) -> None:
    key = in_domain(block_key(b"said in the session"), ADA)
    chat = client.session("ada", "of its user")
    with allocate(SIZE) as memory, client.register(memory) as region, FlagWords.create(1) as flags:
        memory[:SIZE] = payload(key)
        blocks = [Block(key, region, 0, SIZE)]
        assert [one.error for one in chat.arm(blocks).wait(10)] == [None]
        reserved = chat.reserve(blocks).arm(flags[0])
        flags[0].store(1)
        assert [one.already_stored for one in reserved.wait(10)] == [True]
        with pytest.raises(InvalidArgument, match="not made for"):
            client.session("grace", "of another").arm(blocks)
        with pytest.raises(DomainRequired):
            chat.arm([Block(block_key(b"whose?"), region, 0, SIZE)])
    chat.append([key], tokens=1)
    erased = client.erase_user("ada")
    assert (erased.sessions, erased.blocks) == (1, 1)
    assert got(client, key) is MissReason.ERASED


def test_settings_name_either_a_user_or_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGGERKV_NODE", "127.0.0.1:7070")
    assert Reach.of().domain == UNSAID
    assert Reach.of({"user": "ada"}).domain == ADA
    assert Reach.of({"shared": True}).domain == SHARED
    with pytest.raises(ConfigError, match="user or shared"):
        Reach.of({"user": "ada", "shared": True})
    monkeypatch.setenv("TRIGGERKV_SHARED", "true")
    assert Reach.of().domain == SHARED
    assert Reach.of({"user": "shared"}).domain == domain_of("shared"), "a user may have any name"
    with pytest.raises(InvalidArgument, match="surrogate"):
        Reach.of({"user": "\udc80"})


def test_the_command_puts_a_users_block_or_a_shared_one(
    node: NodeProcess, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kv"
    file.write_bytes(b"KV of a page")
    put = ["put", "name:page", str(file), "--node", node.target]
    assert main(put) == Status.FAILED
    assert "or ask for SHARED" in capsys.readouterr().err
    assert main([*put, "--user", "ada"]) == Status.DONE
    own = in_domain(block_key(b"page"), ADA)
    assert own.hex() in capsys.readouterr().out
    assert main([*put, "--shared"]) == Status.DONE
    assert main([*put, "--shared", "--user", "ada"]) == Status.USAGE
    assert client.erase_user("ada").blocks == 1
    assert client.get_inline(own, 12) != b"KV of a page"
    assert client.get_inline(block_key(b"page"), 12) == b"KV of a page"


def test_invalid_names_and_domains_are_typed_errors() -> None:
    key = block_key(b"1")
    for domain, why in ((bytes(16), "zeros"), (b"ada", "16 bytes, not 3"), ("ada", "not str")):
        with pytest.raises(InvalidArgument, match=why):
            in_domain(key, domain)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=why):
            Block(key, None, 0, SIZE, domain=domain)  # type: ignore[arg-type]
    for call in (domain_of, lambda name: user_name(bytes(16), name)):
        with pytest.raises(InvalidArgument, match=r"'a\\udc80' is not valid text"):
            call("a\udc80")
    with pytest.raises(InvalidArgument, match="not int"):
        domain_of(7)  # type: ignore[arg-type]
    assert in_domain(key, UNSAID) == in_domain(key, SHARED) == key


def test_a_user_that_can_be_named_can_be_erased() -> None:
    """One bound for both: no put can name a user that `erase_user` refuses."""
    assert len(domain_of("u" * 128)) == 16
    for name in ("", "u" * 129, "\u00e9" * 65):
        with pytest.raises(InvalidArgument, match="1 to 128 bytes"):
            domain_of(name)
