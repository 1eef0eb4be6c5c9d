"""The fabric address given to clients, which client addresses are accepted, and when the node is ready."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.config import NodeConfig
from kvstore.endpoints import Ports, interface_addresses, open_endpoint
from kvstore.errors import ConfigError, FabricError, Overloaded, ProtocolError
from kvstore.node import fabric_address
from kvstore.node.fabric_address import FabricAddress, fabric_domain, ip_of_peer, parse_networks
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from kvstore.wire.status import ERROR_NAME
from nic_offload.fabric import Fabric
from nic_offload.sockaddr import SocketAddress, ip_of
from tests.conftest import small_client, small_node
from tests.ports import next_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node("shared")

WAIT_S = 20.0
GOOD = SocketAddress(ip_of("127.0.0.1"), 7071).encoded
LOCAL = "ipv4:127.0.0.1:50112"


@pytest.fixture
def fabric() -> Iterator[Fabric]:
    with Fabric("net", address="127.0.0.1") as one:
        yield one


def attach(target: str, claimed: bytes) -> pb.AttachResponse:
    """Attach with this claimed address."""
    request = pb.AttachRequest(
        provider="net", fabric_address=claimed, ack_words=1, block_bytes_max=4096, slots=1
    )
    with grpc.insecure_channel(target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        answer: pb.AttachResponse = next(stub.Attach(iter([request]), timeout=WAIT_S))
    return answer


def refusal_of(target: str, claimed: bytes) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        attach(target, claimed)
    call: Any = caught.value
    return dict(call.trailing_metadata())[ERROR_NAME], call.details()


BAD = [struct.pack("=H", family) + GOOD[2:] for family in (0, 1, 40)]
BAD += [b"", GOOD[:15], GOOD + b"\0", GOOD + bytes(12), bytes(256)]
BAD += [SocketAddress(ip_of("fd00::1"), 7071).encoded]  # of a family that this node's fabric does not have
BAD += [SocketAddress(ip_of(ip), 7071).encoded for ip in ("0.0.0.0", "224.0.0.1", "255.255.255.255")]
BAD += [SocketAddress(ip_of("127.0.0.1"), 0).encoded]


def test_invalid_addresses_are_refused_and_later_clients_still_attach(node: NodeProcess) -> None:
    for claimed in BAD:
        name, sentence = refusal_of(node.target, claimed)
        assert (name, "fabric address" in sentence) == ("ProtocolError", True), sentence
    with small_client(node.target) as client:  # libfabric's address vector is as it was
        client.attach()
        assert client.is_attached


def test_an_address_other_than_the_callers_is_refused_and_audited(tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    with small_node(tmp_path / "node", arguments=("--audit", str(audit))) as node:
        name, sentence = refusal_of(node.target, SocketAddress(ip_of("127.0.0.2"), 7071).encoded)
    assert name == "AddressRefused"
    assert sentence.startswith(
        "The client's fabric address 127.0.0.2 is not the source of its call (127.0.0.1)"
    )
    (line,) = [json.loads(line) for line in audit.read_text().splitlines()]
    assert (line["what"], line["outcome"]) == ("attach", "refused")


def test_an_address_in_a_configured_network_is_trusted_wherever_the_call_comes_from(tmp_path: Path) -> None:
    listed = ("--fabric-clients", "10.0.0.0/8,127.0.0.2/32")
    with small_node(tmp_path / "node", arguments=listed) as node:
        with small_client(node.target, fabric_address="127.0.0.2") as client:
            client.attach()
        with (
            small_client(node.target, fabric_address="127.0.0.3") as client,
            pytest.raises(ProtocolError, match=r"127\.0\.0\.3"),
        ):
            client.attach()


@pytest.mark.parametrize(
    ("peer", "ip"),
    [
        ("ipv4:10.0.0.7:50112", "10.0.0.7"),
        ("ipv6:%5Bfd00::7%5D:50112", "fd00::7"),
        ("ipv6:[fd00::7]:50112", "fd00::7"),
        ("ipv6:%5B::ffff:10.0.0.7%5D:50112", "10.0.0.7"),
        ("ipv6:%5Bfe80::7%25eth0%5D:50112", "fe80::7"),
    ],
)
def test_a_peers_address_is_parsed_as_grpc_writes_it(peer: str, ip: str) -> None:
    assert ip_of_peer(peer) == ip_of(ip)
    for other in ("unix:/run/socket", "ipv4:", "ipv4:nobody:1", ""):
        assert ip_of_peer(other) is None


def test_a_peer_without_an_address_is_on_this_machine(fabric: Fabric) -> None:
    address = FabricAddress("127.0.0.1")
    assert address.believed(GOOD, "unix:/run/socket", fabric) == SocketAddress.of(GOOD)
    with pytest.raises(ProtocolError):
        address.believed(SocketAddress(ip_of("10.0.0.7"), 7071).encoded, "unix:/run/socket", fabric)


def test_the_fabric_address_is_the_listening_one_the_configured_one_or_the_route_to_the_client() -> None:
    with Fabric("net", address=FabricAddress("0.0.0.0").fabric_opens_at("net")) as fabric:
        ports = Ports(17_071, 17_171)
        for address, client, told in (
            (FabricAddress("127.0.0.3", None, ports), "127.0.0.1", "127.0.0.3"),
            (FabricAddress("0.0.0.0", "127.0.0.4", ports), "127.0.0.1", "127.0.0.4"),
            (FabricAddress("::", "localhost", ports), "127.0.0.1", "127.0.0.1"),
            (FabricAddress("0.0.0.0", None, ports), "127.0.0.1", "127.0.0.1"),
        ):
            address.addresses()  # a name is asked for then, and not when a client comes
            opened = address.open(fabric, SocketAddress(ip_of(client), 1))
            at = SocketAddress.of(opened.address)
            assert (str(at.ip), 17_071 <= at.port <= 17_171) == (told, True)
            assert SocketAddress.of(opened.endpoint.address()) == at


class At(NamedTuple):
    """The parts of a connection that decide its domain; it is its own endpoint."""

    tenant: bytes
    domain: int

    @property
    def endpoint(self) -> At:
        return self


def test_each_tenant_has_its_own_fabric_domain_while_there_are_enough_and_then_the_least_shared_one() -> None:
    attached: list[Any] = []

    def attach(tenant: bytes) -> int:
        attached.append(At(tenant, fabric_domain(tenant, attached, 3)))
        return int(attached[-1].domain)

    assert [attach(one) for one in (b"a", b"b", b"a", b"a", b"c", b"b")] == [0, 1, 0, 0, 2, 1]
    assert attach(b"d") == 0, "as many tenants share each"
    assert attach(b"e") == 1
    assert attach(b"d") == 0, "the one that it has"
    attached = [one for one in attached if one.tenant != b"c"]
    assert attach(b"f") == 2, "a tenant that has left holds no domain"


def test_without_a_default_route_the_node_tries_an_interface_and_loopback_only_if_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fabric_address, "source_towards", lambda _: None)
    for up in ((), (ip_of("10.1.2.3"),), (ip_of("10.1.2.3"), ip_of("fd00::1"))):
        monkeypatch.setattr(fabric_address, "interface_addresses", lambda up=up: up)
        assert FabricAddress("0.0.0.0").addresses() == (up or (ip_of("127.0.0.1"),))


@pytest.mark.skipif(shutil.which("ip") is None, reason="there is no ip: apt-get install iproute2")
def test_interface_addresses_are_local_and_reachable_for_others() -> None:
    asked = subprocess.run(["ip", "-o", "addr", "show", "up"], capture_output=True, text=True, check=True)
    shown = {ip_of(line.split()[3].partition("/")[0]) for line in asked.stdout.splitlines()}
    usable = {ip for ip in shown if not ip.is_loopback and (ip.version == 4 or not ip.is_link_local)}
    found = interface_addresses()
    assert set(found) <= usable
    assert {ip.version for ip in found} == {ip.version for ip in usable}


def test_no_name_is_resolved_while_a_client_waits(fabric: Fabric) -> None:
    with pytest.raises(FabricError, match="is not known yet"):
        FabricAddress("0.0.0.0", "localhost").open(fabric, SocketAddress(ip_of("127.0.0.1"), 1))


@pytest.mark.parametrize("told", ["0.0.0.0", "::", "fe80::1", "224.0.0.1"])
def test_an_unreachable_address_is_refused(told: str) -> None:
    with pytest.raises(ConfigError, match="--fabric-address"):
        FabricAddress("0.0.0.0", told)


@pytest.mark.parametrize("told", ["10.0.0.5", "node.example", "fd00::5"])
def test_a_fabric_outside_loopback_needs_the_same_as_listening_there(tmp_path: Path, told: str) -> None:
    with pytest.raises(ConfigError, match=f"{told} without --tls-cert, --tls-key, --tenants"):
        NodeConfig(tmp_path, fabric_address=told)
    for here in ("127.0.0.5", "::1", "localhost"):
        assert NodeConfig(tmp_path, fabric_address=here).fabric_address == here


def test_a_client_of_an_unsupported_address_family_is_refused_with_a_reason(fabric: Fabric) -> None:
    with pytest.raises(ProtocolError, match="of another family; set a --fabric-address"):
        FabricAddress("127.0.0.1").open(fabric, SocketAddress(ip_of("fd00::7"), 1))


def test_ports_are_used_in_turn_and_running_out_is_overloaded(fabric: Fabric) -> None:
    ports, ip = Ports(17_201, 17_203), ip_of("127.0.0.5")
    open_now = [open_endpoint(fabric, ip, ports) for _ in range(3)]
    with pytest.raises(Overloaded, match=r"all of 17201-17203 are in use on 127\.0\.0\.5"):
        open_endpoint(fabric, ip, ports)
    taken = [SocketAddress.of(one.address()).port for one in open_now]
    assert taken == [17_201, 17_202, 17_203]
    for one in open_now:
        one.close()
    again = [SocketAddress.of(open_endpoint(fabric, ip, ports).address()).port for _ in range(2)]
    assert again == [17_201, 17_202]
    with open_endpoint(fabric, ip, Ports(17_204, 17_204)) as one, socket.socket() as other:
        assert SocketAddress.of(one.address()).port == 17_204
        other.bind(("127.0.0.5", 17_203))
        other.listen()
        assert SocketAddress.of(open_endpoint(fabric, ip_of("127.0.0.6"), ports).address()).port == 17_203


def test_a_port_that_was_just_released_is_the_last_to_be_reused(fabric: Fabric) -> None:
    ports, ip = Ports(17_301, 17_303), ip_of("127.0.0.5")
    with open_endpoint(fabric, ip, ports) as first:
        assert SocketAddress.of(first.address()).port == 17_301
    with open_endpoint(fabric, ip, ports) as second:
        assert SocketAddress.of(second.address()).port == 17_302


@pytest.mark.parametrize("text", ["", "x", "0-5", "5-4", "1-65536", "1-2-3", "-1"])
def test_an_invalid_port_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="range of ports"):
        Ports.of(text)


@pytest.mark.parametrize("text", ["", "x", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.0/8,,"])
def test_an_invalid_list_of_networks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a list of networks"):
        parse_networks(text)


def status_of(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def health_of(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S, wait_for_ready=True).status)


def test_a_node_that_cannot_reach_itself_is_not_ready_reports_why_and_retries(tmp_path: Path) -> None:
    grpc_port, http_port, port = next_port(), next_port(), next_port()
    command = [
        sys.executable,
        "-m",
        "kvstore",
        "serve",
        "--tied",
        "--data",
        str(tmp_path),
        "--capacity",
        "64MiB",
    ]
    command += ["--hot", "128MiB", "--listen", f"127.0.0.1:{grpc_port}", "--http", f"127.0.0.1:{http_port}"]
    url = f"http://127.0.0.1:{http_port}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        command += ["--fabric-ports", str(port)]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        node = subprocess.Popen(command, text=True, **pipes)
        assert node.stdin
        assert node.stdout
        assert node.stderr
        for line in node.stderr:
            if "not ready" in line:
                break
        why = f"Each attachment needs a port, and all of {port}-{port} are in use on 127.0.0.1"
        assert why in line
        status, text = status_of(f"{url}/readyz")
        assert (status, text.startswith(f"not ready: {why}")) == (503, True)
        assert status_of(f"{url}/healthz") == (200, "serving\n")
        assert health_of(f"127.0.0.1:{grpc_port}") == health_pb2.HealthCheckResponse.NOT_SERVING
    assert node.stdout.readline() == f"ready 127.0.0.1:{grpc_port}\n"
    assert status_of(f"{url}/readyz") == (200, "ready\n")
    assert health_of(f"127.0.0.1:{grpc_port}") == health_pb2.HealthCheckResponse.SERVING
    node.stdin.close()
    assert node.wait(WAIT_S) == 0
    node.stdout.close()
    node.stderr.close()
