"""The port for metrics, health and the page: its answers, access, and slow or misbehaving callers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import socket
import ssl
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.client import Client, Hit
from kvstore.config import NodeConfig
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import ConfigError, KvError, NodeUnavailable, Overloaded
from kvstore.limits import (
    HEALTH_STILL_MS,
    HTTP_BACKLOG,
    HTTP_CONNECTIONS_MAX,
    HTTP_CONNECTIONS_OF_SOURCE_MAX,
    HTTP_REQUEST_BYTES_MAX,
    HTTP_REQUESTS_PER_S,
    HTTP_TIMEOUT_MS,
    UI_SESSIONS_MAX,
)
from kvstore.names import block_key
from kvstore.node.audit import Audit
from kvstore.node.authorization import Gate
from kvstore.node.http import Answer, HttpServer, _Asked, _Bad
from kvstore.node.listening import Certificates
from kvstore.node.pages import _health
from kvstore.node.tenants import Tenants, token_digest
from tests.client.test_direct_reads import direct, small
from tests.client.test_fabric_caller import get
from tests.client.test_identity import over_tls, pki  # noqa: F401 - a fixture
from tests.client.test_shared import put as put_blocks
from tests.conftest import SMALL_DRIVE, ClientWithBuffers, pin_too_much, small_client, small_node
from tests.nic_offload.rig import wait_until
from tests.storage.fakes import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.node(arguments=("--http", "127.0.0.1:0", "--ui"))


WAIT_S = 20.0
KEY = block_key(b"http")
TENANTS = f"""
[acme]
tokens_sha256 = ["{token_digest("acme")}"]
certificates = ["engine.acme"]
bytes = 1_000_000
[zeta]
tokens_sha256 = ["{token_digest("zeta")}"]
bytes = 2_000_000
[watch]
tokens_sha256 = ["{token_digest("watch")}"]
observer = true
"""
PATHS = ("/metrics", "/", "/ui/state.json")


def http_url(node: NodeProcess) -> str:
    found = re.findall(r"metrics and the page at (http\S+)", node.log())
    return str(found[-1])


def ask(
    url: str, headers: dict[str, str] | None = None, tls: ssl.SSLContext | None = None
) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(url, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=tls) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def values(url: str, headers: dict[str, str] | None = None) -> dict[tuple[str, ...], float]:
    """All samples, by name and the values of their labels."""
    status, _, text = ask(url + "/metrics", headers)
    assert status == 200, text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def state(url: str, headers: dict[str, str] | None = None, query: str = "") -> Any:
    status, _, text = ask(f"{url}/ui/state.json{query}", headers)
    assert status == 200, text
    return json.loads(text)


@pytest.fixture(scope="module")
def untouched(module_folder: Path) -> Iterator[NodeProcess]:
    """A node for tests that only read pages, few enough to stay within the rate limit."""
    more = ("--http", "127.0.0.1:0", "--ui")
    with small_node(module_folder / "untouched", arguments=more) as running:
        yield running


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audit log of the guarded node."""
    return tmp_path_factory.mktemp("guarded") / "audit.jsonl"


@pytest.fixture(scope="module")
def guarded(audit: Path) -> Iterator[NodeProcess]:
    tenants = audit.parent / "tenants.toml"
    tenants.write_text(TENANTS)
    more = (
        "--http",
        "127.0.0.1:0",
        "--ui",
        "--tenants",
        str(tenants),
        "--audit",
        str(audit),
    )
    with small_node(audit.parent / "node", arguments=more) as running:
        yield running


def test_all_work_is_in_the_metrics_and_in_the_state(node: NodeProcess) -> None:
    rig, url = ClientWithBuffers(node), http_url(node)
    blocks = [rig.block(number) for number in range(4)]
    puts = rig.client.reserve(blocks).arm(rig.flags[0])
    rig.flags[0].store(4)
    assert all(result.error is None for result in puts.wait(WAIT_S))
    for _ in range(2):
        rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)
    rig.client.get([rig.wanted(rig.block(9))], timeout_s=WAIT_S)
    rig.client.put_inline(rig.key(10), b"abc")
    rig.client.get_inline(rig.key(10), 3)
    rig.client.exists([KEY])
    told = values(url)
    assert told["kvstore_puts_total",] == told["kvstore_blocks",] == 5
    assert told["kvstore_put_bytes_total",] == sum(block.length for block in blocks) + 3
    assert told["kvstore_hits_total", "memory"] + told["kvstore_hits_total", "drive"] == 9
    assert told["kvstore_misses_total", "unknown"] == 1
    assert told["kvstore_put_seconds_count", "written"] == 5
    in_tiers = [told["kvstore_get_seconds_count", tier] for tier in ("memory", "drive")]
    assert in_tiers == [told["kvstore_hits_total", tier] for tier in ("memory", "drive")]
    assert told["kvstore_lookup_seconds_count", "blocks"] == 1
    assert told["kvstore_call_seconds_count", "Reserve"] == 1
    assert told["kvstore_call_seconds_bucket", "Fetch", "+Inf"] == 3
    assert told["kvstore_connections",] == told["kvstore_drive_here", "0"] == 1
    assert told["process_resident_memory_bytes",] > 1 << 20
    shown = state(url)
    assert [(put["blocks"], put["inline"]) for put in shown["puts"]] == [(1, True), (4, False)]
    for put in shown["puts"]:
        assert 0 <= put["landed_first_ms"] <= put["landed_ms"] <= put["kept_ms"]
    assert shown["misses"] == {"unknown": 1}
    rig.close()


def test_a_put_of_a_session_is_shown_from_its_flag_on(node: NodeProcess) -> None:
    rig = ClientWithBuffers(node)
    chat = rig.client.session("ada", "chat")
    blocks = [rig.block(number) for number in range(2)]
    puts = chat.reserve(blocks).arm(rig.flags[0])
    rig.flags[0].store(2)
    assert all(result.error is None for result in puts.wait(WAIT_S))
    chat.append([block.key for block in blocks], 32)
    (put,) = state(http_url(node))["puts"]
    assert 0 <= put["flag_ms"] <= put["landed_ms"] <= put["kept_ms"]
    rig.close()


def test_the_status_of_each_call_is_counted(node: NodeProcess) -> None:
    with small_client(node.target) as client:
        client.put_inline(KEY, b"abc")
        with pytest.raises(Overloaded):
            pin_too_much(client)
    failed = ("kvstore_calls_failed_total", "Pin", "RESOURCE_EXHAUSTED")
    wait_until(lambda: failed in values(http_url(node)), "the end of the call is counted")
    told = values(http_url(node))
    assert told[failed] == 1
    assert told["kvstore_refused_total",] == 1


@pytest.mark.parametrize("path", PATHS)
def test_a_caller_without_a_token_learns_nothing(guarded: NodeProcess, path: str) -> None:
    url = http_url(guarded) + path
    basic = base64.b64encode(b"whoever:acme").decode()
    for headers in (
        {},
        bearer("stranger"),
        {"Authorization": "Basic " + base64.b64encode(b"acme:x").decode()},
    ):
        status, told, _ = ask(url, headers)
        assert status == 401
        assert told["WWW-Authenticate"].startswith("Basic realm=")
    assert ask(url, bearer("acme"))[0] == ask(url, {"Authorization": f"Basic {basic}"})[0] == 200
    assert ask(url, {"Authorization": "Basic =="})[0] == 400
    assert ask(http_url(guarded) + "/healthz")[::2] == (200, b"serving\n")


def test_a_refusal_is_in_the_audit_log(guarded: NodeProcess, audit: Path) -> None:
    before = len(audit.read_text().splitlines())
    ask(http_url(guarded) + "/metrics", bearer("stranger"))
    (line,) = map(json.loads, audit.read_text().splitlines()[before:])
    assert (line["what"], line["outcome"]) == ("http /metrics", "refused")


def test_a_tenant_sees_its_own_figures_and_an_observer_all(guarded: NodeProcess) -> None:
    url = http_url(guarded)
    for name in ("acme", "zeta"):
        with small_client(guarded.target, token=name) as client:
            client.put_inline(KEY, b"abc")
            client.session(f"user of {name}", f"of {name}").append([KEY], 16)
    for who, seen in (("acme", ["acme"]), ("zeta", ["zeta"]), ("watch", ["acme", "zeta"])):
        quotas = [key[1] for key in values(url, bearer(who)) if key[0] == "kvstore_tenant_quota_bytes"]
        assert quotas == seen
        told = state(url, bearer(who))
        assert sorted(one["session"] for one in told["sessions"]["page"]) == [f"of {name}" for name in seen]
        assert len(told["puts"]) == len(seen)
    nexts = "ff" * 48  # in the middle of somebody else's
    assert len(state(url, bearer("acme"), f"?after={nexts}")["sessions"]["page"]) <= 1


def test_many_sessions_are_listed_in_pages(node: NodeProcess) -> None:
    with small_client(node.target) as client:
        client.put_inline(KEY, b"abc")
        names = {f"chat {number}" for number in range(2 * UI_SESSIONS_MAX + 10)}
        for name in names:
            client.session("ada", name).append([KEY], 16)
    url, query, seen, sizes = http_url(node), "", set[str](), []
    while query is not None:
        sessions = state(url, query=query)["sessions"]
        sizes.append(len(sessions["page"]))
        seen |= {one["session"] for one in sessions["page"]}
        query = f"?after={sessions['next']}" if sessions["next"] else None  # type: ignore[assignment]
    assert (seen, sizes, sessions["total"]) == (names, [UI_SESSIONS_MAX, UI_SESSIONS_MAX, 10], len(names))
    assert ask(url + "/ui/state.json?after=abc")[0] == 400


def test_a_host_name_that_resolves_to_loopback_is_not_trusted(untouched: NodeProcess) -> None:
    url = http_url(untouched)
    for host, status in (
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("localhost:1", 200),
        ("[::1]:1", 200),
    ):
        assert ask(url + "/metrics", {"Host": host})[0] == status


def raw(url: str, sent: bytes) -> bytes:
    host, _, port = url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(sent)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_hits_that_needed_no_call_are_counted_when_a_page_is_requested(
    node: NodeProcess, rig: ClientWithBuffers
) -> None:
    (block,) = small(rig, 1)
    put_blocks(rig, [block])
    before = values(http_url(node))["kvstore_hits_total", "memory"]
    for count in range(1, 9):
        assert get(rig, [block]) == [Hit(block.key)]
        assert values(http_url(node))["kvstore_hits_total", "memory"] == before + count
    assert direct(rig).blocks == count


def asked_at_once(url: str, path: str, count: int) -> list[bytes]:
    """Answers to requests that are all sent, from several addresses, before the first answer is read."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as undo:
        links = [
            undo.enter_context(
                socket.create_connection((host, int(port)), WAIT_S, (f"127.0.0.{2 + at // 8}", 0))
            )
            for at in range(count)
        ]
        for link in links:
            link.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        return [b"".join(iter(partial(link.recv, 1 << 16), b"")) for link in links]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * HTTP_REQUEST_BYTES_MAX + b"\r\n\r\n", b"400"),
        (b"GET /metrics?" + b"&".join(b"f%d=1" % at for at in range(9)) + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"404"),
    ],
)
def test_an_invalid_request_is_refused_with_its_reason(
    untouched: NodeProcess, sent: bytes, status: bytes
) -> None:
    assert raw(http_url(untouched), sent).split(b" ")[1] == status
    assert raw(http_url(untouched), b"HEAD /healthz HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")


def test_silent_callers_do_not_delay_others_for_long(node: NodeProcess) -> None:
    url = http_url(node)
    host, _, port = url.removeprefix("http://").rpartition(":")
    silent = [
        socket.create_connection((host, int(port)), WAIT_S, (f"127.0.0.{2 + at % 40}", 0))
        for at in range(HTTP_CONNECTIONS_MAX + 60)
    ]
    began = time.monotonic()
    assert ask(url + "/healthz")[0] == 200
    assert ask(url + "/metrics")[0] == 200
    assert time.monotonic() - began < HTTP_TIMEOUT_MS / 1000, "nobody's place had to come free by itself"
    with small_client(node.target) as client:
        client.put_inline(KEY, b"abc")
    for connection in silent[:HTTP_CONNECTIONS_MAX]:
        assert connection.recv(1) == b""
    for connection in silent:
        connection.close()


def test_a_source_at_its_limit_loses_its_oldest_connection_without_a_request(node: NodeProcess) -> None:
    host, _, port = http_url(node).removeprefix("http://").rpartition(":")
    with contextlib.ExitStack() as undo:

        def come() -> socket.socket:
            return undo.enter_context(socket.create_connection((host, int(port)), WAIT_S))

        first, *others = [come() for _ in range(HTTP_CONNECTIONS_OF_SOURCE_MAX)]
        time.sleep(0.2)
        last = come()
        began = time.monotonic()
        assert first.recv(1) == b""
        assert time.monotonic() - began < HTTP_TIMEOUT_MS / 2000
        for one in (others[-1], last):
            one.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert one.recv(12) == b"HTTP/1.1 200"


def test_health_is_answered_while_the_node_is_blocked(node: NodeProcess) -> None:
    """Its thread has its own socket; the node's thread is held by a long call."""
    url = http_url(node)
    with small_client(node.target) as client:
        stop = threading.Event()

        def ask_much() -> None:
            keys = [os.urandom(32) for _ in range(1024)]
            while not stop.is_set():
                client.explain(keys)

        asking = [threading.Thread(target=ask_much) for _ in range(4)]
        for one in asking:
            one.start()
        try:
            took_s = []
            for _ in range(20):
                began_s = time.monotonic()
                assert ask(url + "/healthz")[0] == 200
                took_s.append(time.monotonic() - began_s)
            assert statistics.median(took_s) < 1
        finally:
            stop.set()
            for one in asking:
                one.join()


def test_a_caller_over_its_rate_is_told_when_to_retry(node: NodeProcess) -> None:
    url, told = http_url(node), list[bytes]()

    def is_told() -> bool:
        told.extend(asked_at_once(url, "/nowhere", 3 * HTTP_REQUESTS_PER_S))
        return any(b" 429 " in one for one in told)

    wait_until(is_told, "the node is faster than a caller may be", WAIT_S)
    assert {one.split(b" ")[1] for one in told} == {b"404", b"429"}
    assert all(b"\r\nretry-after: 1\r\n" in one.lower() for one in told if b" 429 " in one)
    assert ask(url + "/healthz")[0] == 200


def test_strangers_and_a_tenant_over_its_rate_do_not_use_up_the_rate_of_others(
    tmp_path: Path,
) -> None:
    clock, tenants = FakeClock(), Tenants(bytes(16), FakeClock())
    (tmp_path / "tenants.toml").write_text(TENANTS)
    tenants.load(tmp_path / "tenants.toml")
    server = HttpServer(Gate(tenants, Audit(clock, None)), clock, {}, {})

    def admitted(headers: dict[str, str]) -> str:
        said = {name.lower(): value for name, value in headers.items()}
        try:
            return server._admit(_Asked("/metrics", {}, said, ("127.0.0.1", 1), {})).name
        except KvError as error:
            return type(error).__name__

    for headers, first in (
        ({}, "NotAuthenticated"),
        (bearer("nobody's"), "Overloaded"),
        (bearer("acme"), "acme"),
    ):
        told = [admitted(headers) for _ in range(2 * HTTP_REQUESTS_PER_S)]
        assert (told[0], told[-1]) == (first, "Overloaded")
    assert admitted(bearer("zeta")) == "zeta"


def test_a_delayed_caller_costs_the_nodes_thread_nothing() -> None:
    clock = FakeClock()
    server = HttpServer(Gate(Tenants(bytes(16), clock), Audit(clock, None)), clock, {}, {})
    told: list[object] = []
    waits: list[int] = []

    async def refuse(asked: object) -> Answer:
        told.append(asked)
        raise Overloaded("Later.", 500)

    async def ask() -> None:
        vars(server)["_node_loop"] = asyncio.get_running_loop()
        for who, later_ms in (("one", 0), ("one", 499), ("another", 0), ("one", 1), ("one", 0)):
            clock.now_ms += later_ms
            with pytest.raises(Overloaded) as caught:
                await server._asked_there(who.encode(), cast("_Asked", who))
            waits.append(caught.value.retry_after_ms)

    vars(server)["_page_answer"] = refuse
    asyncio.run(ask())
    assert told == ["one", "another", "one"]
    assert waits == [500, 1, 500, 500, 500]


def test_many_may_wait_for_the_servers_thread_before_a_health_probe_is_dropped() -> None:
    clock, told = FakeClock(), list[int]()
    server = HttpServer(Gate(Tenants(bytes(16), clock), Audit(clock, None)), clock, {}, {})

    async def listen() -> None:
        server.listen("127.0.0.1", 0)
        assert server._listener is not None
        info = server._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        told.append(int.from_bytes(info[28:32], sys.byteorder))  # tcpi_sacked: of a listener, its backlog
        await server.close()

    asyncio.run(listen())
    assert told == [min(HTTP_BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text()))]


def test_over_tls_a_client_certificate_is_accepted_as_a_token(tmp_path: Path, pki: Path) -> None:  # noqa: F811
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    more = over_tls(
        pki, "--tls-clients", str(pki / "ca.pem"), "--tenants", str(tenants), "--http", "127.0.0.1:0", "--ui"
    )
    with small_node(tmp_path / "node", arguments=more) as running:
        url = http_url(running)
        assert url.startswith("https://")
        for name, status in (("acme", 200), ("stranger", 401)):
            tls = ssl.create_default_context(cafile=pki / "ca.pem")
            tls.load_cert_chain(pki / f"{name}.pem", pki / f"{name}.key")
            assert ask(url + "/metrics", tls=tls)[0] == status


def test_with_client_certificates_only_health_is_open_to_callers_without_one(
    tmp_path: Path,
    pki: Path,  # noqa: F811
) -> None:
    tenants, audit = tmp_path / "tenants.toml", tmp_path / "audit.jsonl"
    tenants.write_text(TENANTS)
    more = over_tls(
        pki, "--tls-clients", str(pki / "ca.pem"), "--tenants", str(tenants), "--http", "127.0.0.1:0", "--ui",
        "--audit", str(audit),
    )  # fmt: skip
    with NodeProcess(tmp_path / "node", capacity=SMALL_DRIVE, arguments=more) as running:
        url = http_url(running)
        bare = ssl.create_default_context(cafile=pki / "ca.pem")
        assert ask(url + "/healthz", tls=bare)[::2] == (200, b"serving\n")
        for path in (
            *PATHS,
            "/nowhere",
        ):  # not even whether there is such a page, and a token changes nothing
            status, _, said = ask(url + path, bearer("acme"), tls=bare)
            assert (status, b"certificate" in said) == (403, True)
        known = ssl.create_default_context(cafile=pki / "ca.pem")
        known.load_cert_chain(pki / "acme.pem", pki / "acme.key")
        assert ask(url + "/metrics", tls=known)[0] == 200
        impostor = ssl.create_default_context(cafile=pki / "ca.pem")
        impostor.load_cert_chain(pki / "impostor.pem", pki / "impostor.key")
        with pytest.raises((urllib.error.URLError, OSError)):  # a bad certificate is worse than none
            ask(url + "/healthz", tls=impostor)
        refused = [json.loads(line) for line in audit.read_text().splitlines()]
        assert {line["outcome"] for line in refused if line["what"] == "http /metrics"} == {"refused"}
        with (
            Client(running.target, token="acme", ca=pki / "ca.pem") as client,
            pytest.raises(NodeUnavailable),  # gRPC asks for it in the handshake, as before
        ):
            client.status()


def test_callers_without_a_certificate_use_none_of_the_others_rate(pki: Path) -> None:  # noqa: F811
    clock, nobody = FakeClock(), _Asked("/metrics", {}, {}, ("127.0.0.1", 1), {})
    gate = Gate(Tenants(bytes(16), clock), Audit(clock, None))
    tls = Certificates(
        NodeConfig(
            pki,
            tls_certificate=pki / "node.pem",
            tls_key=pki / "node.key",
            tls_clients=pki / "ca.pem",
        )
    )
    server = HttpServer(gate, clock, {}, {}, tls)
    for _ in range(4 * HTTP_REQUESTS_PER_S):
        with pytest.raises(_Bad, match="without a certificate"):
            server._admit(nobody)
    server._rate_of(None).take(HTTP_REQUESTS_PER_S)


def test_outside_loopback_it_needs_the_same_as_the_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 without --tls-cert, --tls-key, --tenants"):
        NodeConfig(tmp_path, http=("0.0.0.0", 9090))
    with pytest.raises(ConfigError, match="--http"):
        NodeConfig(tmp_path, ui=True)
    with pytest.raises(ConfigError, match="65536"):
        NodeConfig(tmp_path, http=("127.0.0.1", 65536))


def test_health_reports_when_the_nodes_thread_is_blocked_for_good() -> None:
    clock = FakeClock()
    node = cast("Any", SimpleNamespace(clock=clock, ticked_ns=clock.monotonic_ns()))
    clock.now_ms += HEALTH_STILL_MS - 1
    assert _health(node).status == 200
    clock.now_ms += 1
    assert _health(node).status == 503
