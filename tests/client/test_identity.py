"""Every call of the service without credentials, as a wrong and the right tenant; tokens, TLS, certificates."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from kvstore.client import Block, Client, Hit
from kvstore.config import NodeConfig
from kvstore.durability import Durability
from kvstore.errors import (
    ConfigError,
    NodeUnavailable,
    NotAuthenticated,
    Overloaded,
    ProtocolError,
    TenantDenied,
)
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key, layout_fingerprint
from kvstore.node.tenants import token_digest
from kvstore.wire import (
    batches_pb2,
    batches_pb2_grpc,
    blocks_pb2,
    blocks_pb2_grpc,
    kvstore_pb2_grpc,
    lookups_pb2,
    lookups_pb2_grpc,
    observing_pb2,
    observing_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    steps_pb2,
    steps_pb2_grpc,
)
from kvstore.wire import kvstore_pb2 as pb
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.conftest import small_client, small_node
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.wire.fabric_call import Leased

WAIT_S = 20.0
PAGE = 4096
KEY = block_key(b"a block of acme's")
NAME = pb.BlockName(key=KEY, fingerprint=layout_fingerprint(b""), length=PAGE)
TENANTS = f"""
[acme]
tokens_sha256 = ["{token_digest("acme")}"]
certificates = ["engine.acme"]
[zeta]
tokens_sha256 = ["{token_digest("zeta")}"]
[slow]
tokens_sha256 = ["{token_digest("slow")}"]
requests_per_s = 4
"""


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    return path


@pytest.fixture
def guarded(tmp_path: Path, tenants: Path) -> Iterator[NodeProcess]:
    """A node of the test's own, whose tenants and audit log the test may change."""
    more = ("--tenants", str(tenants), "--audit", str(tmp_path / "audit.jsonl"))
    with small_node(tmp_path / "node", arguments=more) as node:
        yield node


@pytest.fixture(scope="module")
def shared(module_folder: Path) -> Iterator[NodeProcess]:
    """A shared node; each test has a tenant of its own."""
    own = [
        f'[acme-{name}]\ntokens_sha256 = ["{token_digest(f"acme-{name}")}"]\n' for name in (*CALLS, "reads")
    ]
    (module_folder / "tenants.toml").write_text(TENANTS + "".join(own))
    more = ("--tenants", str(module_folder / "tenants.toml"))
    with small_node(module_folder / "node", arguments=more) as node:
        yield node


@dataclass
class Acme:
    """A client of the tenant acme with a connection, a block, and an unused lease."""

    client: Client
    connection: int
    lease: Leased


@contextmanager
def having(node: NodeProcess, token: str) -> Iterator[Acme]:
    with small_client(node.target, token=token) as client, FlagWords.create(1) as flags:
        client.put_inline(KEY, b"a" * PAGE)
        client.session("user", "chat").append([KEY, KEY], 32)
        kv = client.register(allocate(PAGE))
        reservation = client.reserve([Block(block_key(b"leased"), kv, 0, PAGE)])
        link = client._core.link
        assert link is not None
        (lease,) = reservation._leases
        reservation.arm(flags[0])
        yield Acme(client, link.number, lease)


@pytest.fixture
def acme(guarded: NodeProcess) -> Iterator[Acme]:
    with having(guarded, "acme") as acme:
        yield acme


Stubs = Any  # of all services; no two have a call of the same name


def stubs(channel: grpc.Channel) -> Stubs:
    made = [
        make(channel)
        for make in (
            kvstore_pb2_grpc.KvStoreStub,
            blocks_pb2_grpc.BlocksStub,
            batches_pb2_grpc.BatchesStub,
            lookups_pb2_grpc.LookupsStub,
            observing_pb2_grpc.ObservingStub,
            sessions_pb2_grpc.SessionsStub,
            steps_pb2_grpc.StepsStub,
        )
    ]
    return SimpleNamespace(**{name: call for stub in made for name, call in vars(stub).items()})


def attach(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
    request = pb.AttachRequest(tenant=tenant, provider="nobody's", block_bytes_max=PAGE, slots=1)
    return next(stub.Attach(iter([request]), metadata=metadata, timeout=WAIT_S))


def reserve(stub: Stubs, acme: Acme, _: str, metadata: Any) -> Any:
    block = pb.ReserveBlock(name=NAME, ack_word=7)
    return stub.Reserve(
        pb.ReserveRequest(connection=acme.connection, blocks=[block]), metadata=metadata, timeout=WAIT_S
    )


def why_failed(stub: Stubs, acme: Acme, _: str, metadata: Any) -> Any:
    request = pb.WhyFailedRequest(connection=acme.connection, generations=[acme.lease.generation])
    return stub.WhyFailed(request, metadata=metadata, timeout=WAIT_S)


def abort(stub: Stubs, acme: Acme, _: str, metadata: Any) -> Any:
    lease = pb.AbortLease(slot=acme.lease.slot, generation=acme.lease.generation)
    return stub.Abort(
        pb.AbortRequest(connection=acme.connection, leases=[lease]), metadata=metadata, timeout=WAIT_S
    )


def fetch(stub: Stubs, acme: Acme, _: str, metadata: Any) -> Any:
    block = pb.FetchBlock(name=NAME, target=0, target_key=0, ack_word=9, ack_generation=1)
    return stub.Fetch(
        pb.FetchRequest(connection=acme.connection, blocks=[block]), metadata=metadata, timeout=WAIT_S
    )


def cancel_fetch(stub: Stubs, acme: Acme, _: str, metadata: Any) -> Any:
    block = pb.CancelledBlock(ack_word=9, ack_generation=1)
    return stub.CancelFetch(
        pb.CancelFetchRequest(connection=acme.connection, blocks=[block]), metadata=metadata, timeout=WAIT_S
    )


def put(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
    start = pb.PutStart(tenant=tenant, name=NAME)
    parts = [pb.PutRequest(start=start), pb.PutRequest(chunk=b"a" * PAGE)]
    return stub.Put(iter(parts), metadata=metadata, timeout=WAIT_S)


def get(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
    return list(stub.Get(pb.GetRequest(tenant=tenant, name=NAME), metadata=metadata, timeout=WAIT_S))


def put_batch(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
    part = batches_pb2.PutPart(name=NAME, chunk=b"a" * PAGE)
    request = batches_pb2.PutBatchRequest(tenant=tenant, parts=[part])
    return list(stub.PutBatch(iter([request]), metadata=metadata, timeout=WAIT_S))


def get_batch(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
    request = batches_pb2.GetBatchRequest(tenant=tenant, blocks=[NAME])
    return list(stub.GetBatch(iter([request]), metadata=metadata, timeout=WAIT_S))


def watch(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
    call = stub.Watch(observing_pb2.WatchRequest(tenant=tenant), metadata=metadata, timeout=WAIT_S)
    first = next(call)
    call.cancel()
    return first


def status(stub: Stubs, _: Acme, __: str, metadata: Any) -> Any:
    return stub.Status(pb.StatusRequest(), metadata=metadata, timeout=WAIT_S)


def pb_name(session: str) -> sessions_pb2.SessionName:
    return sessions_pb2.SessionName(user="user", session=session)


CHAT = pb_name("chat")
# Calls that have one request, and the tenant in it.
REQUESTS = {
    "Exists": blocks_pb2.ExistsRequest(blocks=[NAME]),
    "Prefix": blocks_pb2.PrefixRequest(fingerprint=NAME.fingerprint, keys=[KEY]),
    "Delete": blocks_pb2.DeleteRequest(keys=[KEY]),
    "Explain": blocks_pb2.ExplainRequest(keys=[KEY]),
    "Pin": blocks_pb2.PinRequest(keys=[KEY]),
    "Unpin": blocks_pb2.UnpinRequest(pins=[1]),
    "AppendSession": sessions_pb2.AppendSessionRequest(name=CHAT, keys=[KEY], tokens=16),
    "GetSession": sessions_pb2.GetSessionRequest(name=CHAT, blocks=9),
    "ListSessions": sessions_pb2.ListSessionsRequest(user="user"),
    "ForkSession": sessions_pb2.ForkSessionRequest(source=CHAT),
    "TruncateSession": sessions_pb2.TruncateSessionRequest(name=CHAT, blocks=1),
    "RemoveSession": sessions_pb2.RemoveSessionRequest(name=CHAT, delete_blocks=True),
    "LimitSession": sessions_pb2.LimitSessionRequest(name=CHAT, time_to_live_ms=9_000_000),
    "ProtectSession": sessions_pb2.ProtectSessionRequest(name=CHAT, blocks=1),
    "UnprotectSession": sessions_pb2.UnprotectSessionRequest(name=CHAT),
    "ListLookups": lookups_pb2.ListLookupsRequest(user="user", session="chat"),
    "Statistics": observing_pb2.StatisticsRequest(),
    "PrefetchSession": sessions_pb2.PrefetchSessionRequest(name=CHAT),
    "PrefetchBlocks": steps_pb2.PrefetchBlocksRequest(keys=[KEY]),
    "ReportSteps": steps_pb2.ReportStepsRequest(seen=steps_pb2.SeenByCaller(user="user", session="chat")),
    "GetTrace": steps_pb2.GetTraceRequest(name=CHAT),
    "GetStandby": sessions_pb2.GetStandbyRequest(user="user", map_revision=1),
}


def of_tenant(name: str) -> Callable[[Stubs, Acme, str, Any], Any]:
    def call(stub: Stubs, _: Acme, tenant: str, metadata: Any) -> Any:
        request: Any = type(REQUESTS[name]).FromString(REQUESTS[name].SerializeToString())
        if name == "ForkSession":
            request.name.CopyFrom(pb_name(f"fork {tenant}"))
            request.source.tenant = request.name.tenant = tenant
        elif hasattr(request, "name"):
            request.name.tenant = tenant
        else:
            request.tenant = tenant
        return getattr(stub, name)(request, metadata=metadata, timeout=WAIT_S)

    return call


CALLS: dict[str, Callable[[Stubs, Acme, str, Any], Any]] = {
    "Attach": attach,
    "Reserve": reserve,
    "WhyFailed": why_failed,
    "Abort": abort,
    "Fetch": fetch,
    "CancelFetch": cancel_fetch,
    "Put": put,
    "Get": get,
    "Status": status,
    "PutBatch": put_batch,
    "GetBatch": get_batch,
    "Watch": watch,
    **{name: of_tenant(name) for name in REQUESTS},
}
FILES = (pb, blocks_pb2, batches_pb2, lookups_pb2, observing_pb2, sessions_pb2, steps_pb2)
# What these name is a connection; of one of another tenant the caller is told what they are told of one that is not.
BY_CONNECTION = {"Reserve", "WhyFailed", "Abort", "Fetch", "CancelFetch"}
# And this concerns no tenant.
FOR_ANY_TENANT = {"Status"}
# These end with an error that says this: they got past the gate.
ENDS_WITH = {"Attach": "fabric", "GetStandby": "in no cluster"}


def code_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    try:
        call()
    except grpc.RpcError as error:
        ended = cast("grpc.Call", error)
        return ended.code(), ended.details() or ""
    return grpc.StatusCode.OK, ""


def header(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


def test_the_table_lists_every_call_of_the_service() -> None:
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    calls = [method.name for service in services for method in service.methods]
    assert sorted(CALLS) == sorted(calls)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_authorized_only_for_its_own_tenant(shared: NodeProcess, name: str) -> None:
    owner = f"acme-{name}"
    with having(shared, owner) as acme, grpc.insecure_channel(shared.target) as channel:
        stub = stubs(channel)

        def called(tenant: str, metadata: Any) -> tuple[grpc.StatusCode, str]:
            return code_of(lambda: CALLS[name](stub, acme, tenant, metadata))

        for nobody in ([], header("guess"), header(""), [("authorization", owner)]):
            assert called(owner, nobody)[0] is grpc.StatusCode.UNAUTHENTICATED
        code, why = called(owner, header("zeta"))
        if name in BY_CONNECTION:
            assert (code, why.split(";")[0]) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"There is no connection {acme.connection}",
            )
        elif name not in FOR_ANY_TENANT:
            assert code is grpc.StatusCode.PERMISSION_DENIED
        for claimed in (owner, ""):
            code, why = called(claimed, header(owner))
            assert (code, why) == (grpc.StatusCode.OK, "") or (name in ENDS_WITH and ENDS_WITH[name] in why)


def test_a_tenant_reads_nothing_of_another_tenant(shared: NodeProcess) -> None:
    with having(shared, "acme-reads") as acme, small_client(shared.target, token="zeta") as zeta:
        assert acme.client.get_inline(KEY, PAGE) == b"a" * PAGE
        assert zeta.get_inline(KEY, PAGE) == Miss(MissReason.UNKNOWN)
        zeta.put_inline(KEY, b"z" * PAGE)
        kv = zeta.register(target := allocate(PAGE))
        assert zeta.get([Block(KEY, kv, 0, PAGE)], timeout_s=WAIT_S) == [Hit(KEY)]
        assert target[:] == b"z" * PAGE
        assert acme.client.get_inline(KEY, PAGE) == b"a" * PAGE


def test_a_client_without_a_valid_token_is_refused(shared: NodeProcess) -> None:
    with small_client(shared.target) as client:
        kv = client.register(allocate(PAGE))
        with pytest.raises(NotAuthenticated, match="give the client one"):
            client.reserve([Block(KEY, kv, 0, PAGE)])
        (miss,) = client.get([Block(KEY, kv, 0, PAGE)], timeout_s=WAIT_S)
        assert isinstance(miss, Miss)
        assert "no token" in miss.detail
    with (
        small_client(shared.target, token="zeta", tenant="acme") as client,
        pytest.raises(TenantDenied, match="is zeta"),
    ):
        client.put_inline(KEY, b"x")


def test_a_tenants_rate_is_enforced(shared: NodeProcess) -> None:
    with small_client(shared.target, token="slow") as client:
        kv = client.register(allocate(PAGE))
        blocks = [Block(block_key(bytes([i])), kv, 0, PAGE) for i in range(3)]
        client.reserve(blocks)  # three, and one for attaching
        with pytest.raises(Overloaded) as caught:
            client.reserve(blocks)
        assert 0 < caught.value.retry_after_ms <= 1000
        (miss, *_) = client.get(blocks, timeout_s=WAIT_S)
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.BUSY


def test_reloaded_tenants_are_removed_and_added_without_a_restart(
    guarded: NodeProcess, acme: Acme, tenants: Path
) -> None:
    tenants.write_text(f'[zeta]\ntokens_sha256 = ["{token_digest("zeta-2")}"]\n')
    os.kill(guarded.pid, signal.SIGHUP)
    wait_until(lambda: acme.client._core.link is None, "the connection of who is no tenant any more ends")
    with pytest.raises(NotAuthenticated):
        acme.client.put_inline(KEY, b"x")
    with small_client(guarded.target, token="zeta-2") as client:
        assert client.put_inline(KEY, b"x") is Durability.WRITTEN
    tenants.write_text("[")
    os.kill(guarded.pid, signal.SIGHUP)
    wait_until(
        lambda: "The tenants are unchanged" in guarded.log(), "the node refuses a file that is no TOML"
    )
    with small_client(guarded.target, token="zeta-2") as client:
        assert client.put_inline(KEY, b"x") is Durability.WRITTEN


def test_the_audit_log_records_accepted_and_refused_callers(
    guarded: NodeProcess, acme: Acme, tmp_path: Path
) -> None:
    with small_client(guarded.target, token="guess") as client, pytest.raises(NotAuthenticated):
        client.put_inline(KEY, b"x")
    acme.client.close()
    path = tmp_path / "audit.jsonl"

    def seen() -> list[tuple[str, str, str]]:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [(line["what"], line["tenant"], line["outcome"]) for line in lines]

    wait_until(lambda: ("detach", "acme", "ok") in seen(), "the end of the connection is in the log")
    assert seen() == [("attach", "acme", "ok"), ("put", "", "refused"), ("detach", "acme", "ok")]


# --- TLS


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, timeout=WAIT_S, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; a node's certificate and two clients' from the first, one client's from the second."""
    folder = tmp_path_factory.mktemp("pki")
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    for authority in ("ca", "other-ca"):
        _openssl(
            folder,
            "req",
            "-x509",
            *kind,
            "-subj",
            f"/CN={authority}",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",  # Python 3.13 checks that it is there
            "-keyout",
            f"{authority}.key",
            "-out",
            f"{authority}.pem",
        )
    for name, authority, names in (
        ("node", "ca", "IP:127.0.0.1,DNS:localhost"),
        ("acme", "ca", "DNS:engine.acme"),
        ("stranger", "ca", "DNS:engine.stranger"),
        ("impostor", "other-ca", "DNS:engine.acme"),
        ("by-mail", "ca", "email:engine.acme"),
        ("engine.acme", "ca", "DNS:engine.other"),
    ):
        _openssl(
            folder, "req", *kind, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"
        )
        (folder / "names").write_text(f"subjectAltName={names}\n")
        _openssl(
            folder, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem", "-CAkey", f"{authority}.key",
            "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem",
        )  # fmt: skip
    return folder


def over_tls(pki: Path, *more: str) -> tuple[str, ...]:
    return ("--tls-cert", str(pki / "node.pem"), "--tls-key", str(pki / "node.key"), *more)


def test_over_tls_a_token_suffices_and_plain_or_untrusting_clients_are_refused(
    tmp_path: Path, tenants: Path, pki: Path
) -> None:
    more = over_tls(pki, "--tenants", str(tenants))
    with small_node(tmp_path / "node", arguments=more) as node:
        with (
            small_client(node.target, token="acme", ca=pki / "ca.pem") as client,
            FlagWords.create(1) as flags,
        ):
            kv = client.register(allocate(PAGE))
            puts = client.reserve([Block(KEY, kv, 0, PAGE)]).arm(flags[0])
            flags[0].store(1)
            assert [result.error for result in puts.wait(WAIT_S)] == [None]
            assert client.get([Block(KEY, kv, 0, PAGE)], timeout_s=WAIT_S) == [Hit(KEY)]
        with small_client(node.target, ca=pki / "ca.pem") as client, pytest.raises(NotAuthenticated):
            client.put_inline(KEY, b"x")
        for client in (
            small_client(node.target, token="acme"),
            small_client(node.target, token="acme", ca=pki / "other-ca.pem"),
        ):
            with client, pytest.raises(NodeUnavailable):
                client.put_inline(KEY, b"x")


def test_client_certificates_work_as_tokens(tmp_path: Path, tenants: Path, pki: Path) -> None:
    more = over_tls(pki, "--tls-clients", str(pki / "ca.pem"), "--tenants", str(tenants))

    def shown(name: str) -> dict[str, Path]:
        return {"ca": pki / "ca.pem", "certificate": pki / f"{name}.pem", "key": pki / f"{name}.key"}

    with small_node(tmp_path / "node", arguments=more) as node:
        with small_client(node.target, **shown("acme")) as client:
            assert client.put_inline(KEY, b"a") is Durability.WRITTEN
        with (
            small_client(node.target, **shown("acme"), tenant="zeta") as client,
            pytest.raises(TenantDenied),
        ):
            client.put_inline(KEY, b"x")
        for name in ("stranger", "by-mail", "engine.acme"):
            with small_client(node.target, **shown(name)) as client, pytest.raises(NotAuthenticated):
                client.put_inline(KEY, b"x")
        for tls in (shown("impostor"), {"ca": pki / "ca.pem"}):
            with small_client(node.target, **tls, token="acme") as client, pytest.raises(NodeUnavailable):
                client.put_inline(KEY, b"x")


@pytest.mark.parametrize(
    ("given", "wanting"),
    [
        ((), "--tls-cert, --tls-key, --tenants"),
        (("tls",), "--tenants"),
        (("tenants",), "--tls-cert, --tls-key"),
    ],
)
def test_a_node_outside_loopback_needs_tls_and_tenants(
    tmp_path: Path, given: tuple[str, ...], wanting: str
) -> None:
    settings: dict[str, Any] = {}
    if "tls" in given:
        settings |= {"tls_certificate": tmp_path / "c", "tls_key": tmp_path / "k"}
    if "tenants" in given:
        settings["tenants"] = tmp_path / "t"
    with pytest.raises(ConfigError, match=f"without {wanting}: beyond loopback"):
        NodeConfig(tmp_path, host="192.0.2.1", **settings)


def test_with_tls_and_tenants_a_node_may_listen_anywhere(tmp_path: Path) -> None:
    paths: dict[str, Any] = {"tls_certificate": tmp_path, "tls_key": tmp_path, "tenants": tmp_path}
    assert NodeConfig(tmp_path, host="0.0.0.0", **paths).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--tls-cert", "x"), "needs its key"),
        (("--tls-clients", "x"), "Client certificates need TLS"),
        (("--tls-cert", "/nowhere", "--tls-key", "/nowhere"), "/nowhere could not be read"),
        (
            ("--tls-cert", "/etc/passwd", "--tls-key", "/etc/passwd"),
            "/etc/passwd contains no certificate in PEM",
        ),
        (("--tenants", "/nowhere"), "/nowhere could not be read"),
        (("--audit", "/"), "audit log / can't be written"),
    ],
)
def test_unusable_settings_end_the_node_with_one_sentence(
    tmp_path: Path, more: tuple[str, ...], why: str
) -> None:
    with pytest.raises(NodeUnavailable, match=why):
        small_node(tmp_path / "node", arguments=more)


def test_each_mistake_in_the_certificates_has_its_own_message(tmp_path: Path, pki: Path) -> None:
    def refused(certificate: str, key: str, *more: str) -> str:
        arguments = ("--tls-cert", str(pki / certificate), "--tls-key", str(pki / key), *more)
        with pytest.raises(NodeUnavailable) as raised:
            small_node(tmp_path / "node", arguments=arguments)
        assert "Traceback" not in str(raised.value)
        return str(raised.value)

    assert "acme.key is not the key of" in refused("node.pem", "acme.key")
    assert "node.pem contains no key in PEM" in refused("node.pem", "node.pem")
    assert "node.key contains no certificate in PEM" in refused("node.key", "node.key")
    assert "node.key contains no certificate" in refused(
        "node.pem", "node.key", "--tls-clients", str(pki / "node.key")
    )
    (pki / "cut.pem").write_text((pki / "node.pem").read_text()[:200])
    assert "can't be used" in refused("cut.pem", "node.key")


def test_an_unavailable_port_is_reported_with_the_reason(shared: NodeProcess, tmp_path: Path) -> None:
    taken = shared.target.rpartition(":")[2]
    with pytest.raises(NodeUnavailable, match=f"Port {taken} on 127.0.0.1 is in use by another process"):
        small_node(tmp_path / "node", port=int(taken))


def test_unreadable_files_of_a_client_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere could not be read"):
        small_client("127.0.0.1:1", ca=tmp_path / "nowhere")


def test_a_connection_number_is_not_a_credential(shared: NodeProcess) -> None:
    """Without the check, a guessed number could fetch acme's blocks into acme's memory, or end its leases."""
    with having(shared, "acme") as acme, small_client(shared.target, token="zeta") as zeta:
        kv = zeta.register(allocate(PAGE))
        link = zeta._core.attached(WAIT_S)
        link.number, link.calls = acme.connection, None  # over the fabric there is no number to say
        with pytest.raises(ProtocolError, match="There is no connection"):
            zeta.reserve([Block(KEY, kv, 0, PAGE)])
