"""A small HTTP/1.1 server on its own thread and loop: GET and HEAD, one request per connection.

Health is answered on that thread, whatever the node's thread is doing. Other requests are authenticated and answered on
the node's thread.

What always holds: the number of connections is bounded, in all and per source, including those in their handshake. A
further one closes the oldest of its source that has sent no request, or one of the source with the most. A request has
a bounded size and a deadline, and so has its answer. All but health requires authentication; where clients need
certificates, a client without one gets nothing but health. Nothing can be changed over HTTP.
What it doesn't do: keep-alive, request bodies, compression. It serves Prometheus and a few people.

A node without tenants trusts any caller on loopback. A browser is such a caller for any web page whose name resolves to
127.0.0.1, so the node answers only if the request's host is an address or `localhost`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import logging
import socket
import ssl
import threading
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qsl

from kvstore.endpoints import is_wildcard
from kvstore.errors import CannotListen, KvError, NotAuthenticated, Overloaded, ProtocolError, TenantDenied
from kvstore.limits import (
    ACCEPT_AGAIN_MS,
    HTTP_BACKLOG,
    HTTP_CONNECTIONS_MAX,
    HTTP_CONNECTIONS_OF_SOURCE_MAX,
    HTTP_FIELDS_MAX,
    HTTP_REQUEST_BYTES_MAX,
    HTTP_REQUESTS_PER_S,
    HTTP_TIMEOUT_MS,
)
from kvstore.node.connection_guard import source_of
from kvstore.node.listening import why_not
from kvstore.node.rates import Rate
from nic_offload.errors import shown
from nic_offload.sockaddr import ip_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvstore.clock import Clock
    from kvstore.node.authorization import Gate
    from kvstore.node.listening import Certificates
    from kvstore.node.tenants import Tenant

__all__ = ["Answer", "Closes", "HttpServer", "Question"]

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = HTTP_TIMEOUT_MS / 1000
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    429: "Too Many Requests",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_ALWAYS: Final = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Closes(Protocol):
    """Something that ends with the server."""

    def close(self) -> None:
        """End it, and free what it holds. Called once, when the server ends."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """An authenticated request."""

    tenant: Tenant
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """A response."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class _Bad(Exception):
    """An invalid request, or one for an unknown page; the status says which."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Asked(NamedTuple):
    """What the node uses of a request."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]
    peer: tuple[Any, ...]
    certificate: Mapping[str, Any]


@dataclass(slots=True)
class _Caller:
    """A caller, and the progress of its request."""

    source: str
    connection: socket.socket
    has_asked: bool = False
    leaves: bool = False


class HttpServer:
    """Serves `pages` to authenticated callers, and `health` to any caller."""

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        health: Mapping[str, Callable[[], Answer]],
        pages: Mapping[str, Callable[[Question], Awaitable[Answer]]],
        tls: Certificates | None = None,
        closes: Closes | None = None,
    ) -> None:
        self._gate = gate
        self._health = health
        self._pages = pages
        self._tls = tls
        self._closes = closes
        self._wants_certificate = tls is not None and tls.context.verify_mode is not ssl.CERT_NONE
        self._clock = clock
        self._rates: dict[bytes | None, Rate] = {}  # by tenant: at most as many as tenants files have named
        self._later_ms: dict[bytes, int] = {}  # by source and credentials of a caller: when it may retry
        self._closing = threading.Event()
        self._serving: dict[asyncio.Task[None], _Caller] = {}  # oldest first
        self._node_loop: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int) -> str:
        """Bind the port; returns the address for people. Call it on the node's loop."""
        # As in gRPC, either wildcard means both families.
        every = is_wildcard(host) and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                ("::" if every else host, port),
                family=family,
                backlog=HTTP_BACKLOG,
                dualstack_ipv6=every,
            )
        except OSError as error:
            raise CannotListen(why_not(error, host, port)) from error
        self._listener.setblocking(False)
        self._node_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="kvstore-http", daemon=True
        )
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._tls is None else 'https'}://{shown}:{self.port}"

    @property
    def port(self) -> int:
        """The port on which it listens."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """Release the port, and close all connections."""
        if self._closes is not None:
            self._closes.close()
        if self._thread is None or self._listener is None:
            return
        self._closing.set()
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(stop.set)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._listener.close()

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._closing.is_set():
            return
        assert self._listener is not None
        accepting = asyncio.create_task(self._accept(self._listener))
        await self._stop.wait()
        tasks = [*self._serving, accepting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # the process has no descriptor left, or the caller has left
                log.warning("--http could not accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_MS / 1000)  # a busy loop would stop other work
                continue
            caller = _Caller(source_of(ip_of(str(address[0]).partition("%")[0])), connection)
            if not self._make_room(caller.source):
                connection.close()
                continue
            task = asyncio.create_task(self._serve(caller))
            self._serving[task] = caller
            task.add_done_callback(self._over)
            await asyncio.sleep(0)  # requests being served continue, however many connections arrive

    def _make_room(self, source: str) -> bool:
        """Close a connection if its source, or all, have the maximum; False if none can be closed."""
        of: dict[str, int] = {}
        here = [one for one in self._serving.values() if not one.leaves]
        for one in here:
            of[one.source] = of.get(one.source, 0) + 1
        if of.get(source, 0) < HTTP_CONNECTIONS_OF_SOURCE_MAX:
            if len(here) < HTTP_CONNECTIONS_MAX:
                return True
            source = max(of, key=of.__getitem__)
        for one in here:
            if one.source == source and not one.has_asked:
                one.leaves = True
                with contextlib.suppress(OSError):
                    one.connection.shutdown(socket.SHUT_RDWR)  # its reader sees the end
                return True
        return False

    def _over(self, task: asyncio.Task[None]) -> None:
        self._serving.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("--http failed to answer", exc_info=task.exception())

    async def _serve(self, caller: _Caller) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HTTP_REQUEST_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        tls = None if self._tls is None else self._tls.context
        handshake_s = None if tls is None else _TIMEOUT_S
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, caller.connection, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        except OSError:  # a failed handshake is the caller's problem
            caller.connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_TIMEOUT_S):
                    head, answer = await self._answer(caller, reader, writer)
                writer.write(_encoded(answer, with_body=head != "HEAD"))
                async with asyncio.timeout(_TIMEOUT_S):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            transport.abort()  # a caller that has not read it by now won't get it; no effect after a clean end

    async def _answer(
        self, caller: _Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, Answer]:
        method = ""
        try:
            method, path, query, headers = await _read(reader)
            caller.has_asked = True
            if path in self._health:
                return method, self._health[path]()
            peer = writer.get_extra_info("peername") or ("?", 0)
            certificate = writer.get_extra_info("peercert") or {}
            who = blake2b(repr((caller.source, headers.get("authorization"), certificate)).encode()).digest()
            asked = _Asked(path, query, headers, peer, certificate)
            return method, await self._asked_there(who, asked)
        except (_Bad, KvError) as error:
            return method, _refusal(error)

    async def _asked_there(self, who: bytes, asked: _Asked) -> Answer:
        """Have the node answer, unless this caller was told to retry later: then the node's thread is not involved."""
        now_ms, until_ms = self._clock.monotonic_ns() // 1_000_000, self._later_ms.get(who, 0)
        if now_ms < until_ms:
            raise Overloaded("Too many requests were made; see Retry-After.", until_ms - now_ms)
        assert self._node_loop is not None
        there = asyncio.run_coroutine_threadsafe(self._page_answer(asked), self._node_loop)
        try:
            return await asyncio.wrap_future(there)
        except Overloaded as error:
            if len(self._later_ms) >= HTTP_CONNECTIONS_MAX:
                self._later_ms.clear()
            self._later_ms[who] = now_ms + error.retry_after_ms
            raise

    async def _page_answer(self, asked: _Asked) -> Answer:
        """The node's answer, made on its thread."""
        question = Question(self._admit(asked), asked.query)
        page = self._pages.get(asked.path)
        if page is None:
            hint = "" if "/" in self._pages else " `kvstore serve --ui` serves one of the node, at /."
            raise _Bad(404, f"There is no page {shown(asked.path)}.{hint}")
        return await page(question)

    def _admit(self, asked: _Asked) -> Tenant:
        what, who = f"http {asked.path[:32]}", f"http:{asked.peer[0]}:{asked.peer[1]}"
        if self._wants_certificate and not asked.certificate:  # before it can use up the others' share
            why = "Clients without a certificate may only use /healthz and /readyz."
            self._gate.audit.refused(what, tenant="", peer=who, why=why)
            raise _Bad(403, why)
        if self._gate.tenants.is_open and not _is_address(asked.headers.get("host", "")):
            raise _Bad(403, "A node without tenants answers only to an IP address or localhost.")
        try:
            tenant = self._gate.admit(what, _metadata(asked.headers), _names(asked.certificate), who)
        except NotAuthenticated:
            self._rate_of(None).take(1)
            raise
        self._rate_of(tenant.id).take(1)
        return tenant

    def _rate_of(self, tenant: bytes | None) -> Rate:
        """One bucket per tenant, and one for all unauthenticated callers, which so can't use up a monitor's."""
        if tenant not in self._rates:
            self._rates[tenant] = Rate(self._clock, HTTP_REQUESTS_PER_S)
        return self._rates[tenant]


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], dict[str, str]]:
    """Method, path, query and headers of a request."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _Bad(400, f"A request has at most {HTTP_REQUEST_BYTES_MAX} bytes.") from None
    first, *lines = text.rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):  # noqa: PLR2004
        raise _Bad(400, "That is not an HTTP/1.1 request.")
    if words[0] not in ("GET", "HEAD"):
        raise _Bad(405, "Only GET and HEAD are supported.")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise _Bad(400, "A header has a name, a colon and a value.")
        headers[name.lower()] = value.strip()
    path, _, query = words[1].partition("?")
    try:
        fields = dict(parse_qsl(query, max_num_fields=HTTP_FIELDS_MAX))
    except ValueError:
        raise _Bad(400, f"A query has at most {HTTP_FIELDS_MAX} fields.") from None
    return words[0], path, fields, headers


def _metadata(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """A token in the gate's form, from `Bearer`, or from the password of `Basic`, for which browsers prompt."""
    authorization = headers.get("authorization", "")
    kind, _, said = authorization.partition(" ")
    if kind.lower() != "basic":
        return [("authorization", authorization)] if authorization else []
    try:
        _, _, token = base64.b64decode(said.strip(), validate=True).decode().partition(":")
    except ValueError:  # not base64, not ASCII, or not UTF-8 inside
        raise _Bad(400, "The header Authorization can't be read.") from None
    return [("authorization", f"Bearer {token}")]


def _names(certificate: Mapping[str, Any]) -> dict[str, list[bytes]]:
    """The names in a client's certificate, in gRPC's form."""
    alternative = list(certificate.get("subjectAltName", ()))
    common = [
        value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"
    ]
    return {
        "peer_dns": [value.encode() for kind, value in alternative if kind == "DNS"],
        "x509_subject_alternative_name": [str(value).encode() for _, value in alternative],
        "x509_common_name": [one.encode() for one in common],
    }


def _is_address(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _refusal(error: _Bad | KvError) -> Answer:
    status, headers = 400 if isinstance(error, ProtocolError) else 500, {}
    if isinstance(error, _Bad):
        status = error.status
    elif isinstance(error, NotAuthenticated):
        status, headers = 401, {"WWW-Authenticate": 'Basic realm="kvstore", charset="UTF-8"'}
    elif isinstance(error, TenantDenied):
        status = 403
    elif isinstance(error, Overloaded):
        status, headers = 429, {"Retry-After": str(max(1, -(-error.retry_after_ms // 1000)))}
    return Answer(f"{error}\n".encode(), status=status, headers=headers)


def _encoded(answer: Answer, *, with_body: bool) -> bytes:
    headers = {
        **_ALWAYS,
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.body)),
        **answer.headers,
    }
    lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode() + (answer.body if with_body else b"")
