"""A small HTTP/1.1 server on the node's own loop: GET and HEAD, one request a connection, nothing else.

What always holds: so many connections at a time and no more, those in their handshake included; a request has a bounded
size, comes within its time or not at all, and its answer is taken within its time; it passes the gate first, but for
health. Where clients need certificates, who shows none is told nothing but health. There is no way to change anything.
What it does not do: keep a connection, take a body, compress. It is asked by a Prometheus and a few people.

A node without tenants believes whoever comes over loopback. A browser does that for any page of the Internet whose name
leads to 127.0.0.1, so such a node answers only to hosts that are addresses, or `localhost`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import logging
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

from kvstore.errors import ConfigError, KvError, NotAuthenticated, Overloaded, ProtocolError, TenantDenied
from kvstore.limits import (
    HTTP_CONNECTIONS_MAX,
    HTTP_REQUEST_BYTES_MAX,
    HTTP_REQUESTS_PER_S,
    HTTP_TIMEOUT_MS,
)
from kvstore.node.rates import Rate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kvstore.clock import Clock
    from kvstore.node.gate import Gate
    from kvstore.node.listening import Certificates
    from kvstore.node.tenants import Tenant

__all__ = ["Answer", "HttpServer", "Question"]

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


@dataclass(frozen=True, slots=True)
class Question:
    """What somebody asks, who has passed the gate."""

    tenant: Tenant
    query: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What he is told."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class _Bad(Exception):
    """A request that is none, or is for nobody here; the status says which."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class HttpServer:
    """Answers what `pages` has an answer for; the pages of `health` answer anybody."""

    def __init__(
        self,
        gate: Gate,
        clock: Clock,
        health: Mapping[str, Callable[[], Answer]],
        pages: Mapping[str, Callable[[Question], Awaitable[Answer]]],
        tls: Certificates | None = None,
    ) -> None:
        self._gate = gate
        self._health = health
        self._pages = pages
        self._tls = tls
        self._wants_certificate = tls is not None and tls.context.verify_mode is not ssl.CERT_NONE
        self._rate = Rate(clock, HTTP_REQUESTS_PER_S)
        self._room = asyncio.Semaphore(HTTP_CONNECTIONS_MAX)
        self._serving: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    def listen(self, host: str, port: int) -> str:
        """Take the port; gives the address as people write it."""
        # As gRPC does, it takes either wildcard for that of both families.
        every = host in ("::", "0.0.0.0") and socket.has_dualstack_ipv6()  # noqa: S104
        family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                ("::" if every else host, port), family=family, dualstack_ipv6=every
            )
        except OSError as error:
            raise ConfigError(f"--http could not listen on {host}:{port}: {error.strerror}.") from error
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        shown = f"[{host}]" if ":" in host else host
        return f"{'http' if self._tls is None else 'https'}://{shown}:{self._listener.getsockname()[1]}"

    async def close(self) -> None:
        """Let go of the port, and of who is there."""
        tasks = [*self._serving, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # the process has no descriptor left, or the caller has gone
                log.warning("--http could not take a connection: %s", error)
                self._room.release()
                await asyncio.sleep(
                    0.1
                )  # what is wrong does not pass at once, and a loop would stop the node
                continue
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._room.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("--http failed to answer", exc_info=task.exception())

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=HTTP_REQUEST_BYTES_MAX)
        protocol = asyncio.StreamReaderProtocol(reader)
        tls = None if self._tls is None else self._tls.context
        handshake_s = None if tls is None else _TIMEOUT_S
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        except OSError:  # a handshake that failed is its caller's matter
            connection.close()
            return
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(_TIMEOUT_S):
                    head, answer = await self._answer(reader, writer)
                writer.write(_encoded(answer, with_body=head != "HEAD"))
                async with asyncio.timeout(_TIMEOUT_S):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        finally:
            transport.abort()  # whoever has not taken it by now does not get it; nothing after a clean end

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, Answer]:
        method = ""
        try:
            method, path, query, headers = await _read(reader)
            if path in self._health:
                return method, self._health[path]()
            question = Question(self._admit(path, headers, writer), query)
            page = self._pages.get(path)
            if page is None:
                raise _Bad(404, "There is no such page.")  # noqa: TRY301 - one way out for all that is refused
            return method, await page(question)
        except (_Bad, KvError) as error:
            return method, _refusal(error)

    def _admit(self, path: str, headers: Mapping[str, str], writer: asyncio.StreamWriter) -> Tenant:
        peer = writer.get_extra_info("peername") or ("?", 0)
        what, who = f"http {path[:32]}", f"http:{peer[0]}:{peer[1]}"
        certificate = writer.get_extra_info("peercert") or {}
        if self._wants_certificate and not certificate:  # before he can use up what others may ask
            why = "Here is nothing but /healthz and /readyz for clients without a certificate."
            self._gate.audit.refused(what, tenant="", peer=who, why=why)
            raise _Bad(403, why)
        self._rate.take(1)
        if self._gate.tenants.is_open and not _is_address(headers.get("host", "")):
            raise _Bad(
                403, "A node without tenants answers to an address or to localhost, and to no other name."
            )
        return self._gate.admit(what, _metadata(headers), _names(certificate), who)


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], dict[str, str]]:
    """Method, path, query and headers of a request."""
    try:
        text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _Bad(400, f"A request has {HTTP_REQUEST_BYTES_MAX} bytes at most.") from None
    first, *lines = text.rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):  # noqa: PLR2004
        raise _Bad(400, "That is no request of HTTP/1.1.")
    if words[0] not in ("GET", "HEAD"):
        raise _Bad(405, "There is nothing here but GET and HEAD.")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip():
            raise _Bad(400, "A header has a name, a colon and a value.")
        headers[name.lower()] = value.strip()
    path, _, query = words[1].partition("?")
    return words[0], path, dict(parse_qsl(query, max_num_fields=8)), headers


def _metadata(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """A token as the gate knows it, out of `Bearer`, or out of the password of `Basic`, which browsers ask for."""
    authorization = headers.get("authorization", "")
    kind, _, said = authorization.partition(" ")
    if kind.lower() != "basic":
        return [("authorization", authorization)] if authorization else []
    try:
        _, _, token = base64.b64decode(said.strip(), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        raise _Bad(400, "The header Authorization can't be read.") from None
    return [("authorization", f"Bearer {token}")]


def _names(certificate: Mapping[str, Any]) -> dict[str, list[bytes]]:
    """The names in a client's certificate, as gRPC calls them."""
    alternative = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI")]
    common = [
        value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"
    ]
    return {
        "x509_subject_alternative_name": [one.encode() for one in alternative],
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
