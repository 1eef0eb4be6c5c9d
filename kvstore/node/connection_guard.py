"""Guards the node's ports: the `ConnectionGuard` watches the sockets that gRPC and libfabric accept, and closes some.

Both libraries accept any connection and keep it for as long as the peer likes. The guard lists the process's
sockets ten times a second while there are any, more often while it finds some to close, and closes these: a connection
to the port for calls that has had no call admitted by its deadline, or shortly after it has sent many bytes; one whose
client does not read an answer, keeps calling when told to wait, or floods (too much metadata, or too many bytes outside
messages); those that exceed the limit of one source; and at a fabric endpoint all but those of its own client. A source
that keeps connecting is barred for a time, by a filter on the listening socket that the kernel runs on each packet.
While there is nothing to check, it reads two kernel counters twice a second, which costs an idle node almost nothing,
and lists the sockets every five seconds until the machine has received nothing for a while. It also returns unused heap
memory after load.

What always holds: a connection that has had a call admitted is closed only if its source exceeds its limit, or if it
does not read an answer, keeps calling, or floods. A connection is ended by `shutdown` on a duplicate of its
descriptor, after a check that it is the same socket, so its library sees a normal end; it reads none of what had
arrived before. A source is one IPv4 address, or the /64 of an IPv6 address. No source is barred forever.
What it doesn't do: look at the contents, only at amounts; or distinguish hosts behind one address.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from kvstore.limits import (
    GUARD_ATTEMPT_BYTES,
    GUARD_ATTEMPTS_OF_SOURCE_MAX,
    GUARD_ATTEMPTS_PER_NEW_MAX,
    GUARD_ATTEMPTS_PER_OVERSIZED,
    GUARD_ATTEMPTS_PER_REPEATING,
    GUARD_BARRED_MS,
    GUARD_BARRED_SOURCES_MAX,
    GUARD_CALL_BYTES,
    GUARD_CHECK_AGAIN_MS,
    GUARD_CHECK_IDLE_MS,
    GUARD_CHECK_MS,
    GUARD_CONNECTIONS_OF_SOURCE_MAX,
    GUARD_FABRIC_CONNECTIONS_OF_CLIENT_MAX,
    GUARD_FRAMES_BYTES_MAX,
    GUARD_FRAMES_BYTES_S,
    GUARD_MESSAGE_BYTES,
    GUARD_MESSAGE_SHARE,
    GUARD_QUICK_CHECK_MS,
    GUARD_REPEATS_KEPT_MAX,
    GUARD_REPEATS_MAX,
    GUARD_SEGMENTS_MAX,
    GUARD_TIMEOUT_MS,
    GUARD_UNAUTHENTICATED_BYTES_MAX,
    GUARD_UNAUTHENTICATED_BYTES_MS,
    GUARD_UNAUTHENTICATED_OF_SOURCE_MAX,
    GUARD_WINDOW_MS,
    HEAP_LOOK_MS,
)
from kvstore.node import own_sockets, packet_filter
from kvstore.node.fabric_address import ip_of_peer
from kvstore.node.heap import Heap
from kvstore.node.tcp_counters import TcpCounters
from nic_offload.sockaddr import ip_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvstore.clock import Clock
    from kvstore.node.fabric_address import Network
    from nic_offload.sockaddr import Ip

__all__ = ["ConnectionGuard", "source_of"]

log = logging.getLogger(__name__)

_OF_CALLS: Final = "ipv"  # gRPC's names of peers begin with `ipv4:` or `ipv6:`
_IPV4: Final = 4
_MS: Final = 1_000_000
_S: Final = 1_000 * _MS

T = TypeVar("T")


def source_of(ip: Ip) -> str:
    """The part of an address that a caller can't change for free: an IPv4 address, or the /64 of an IPv6 one."""
    return str(ip) if ip.version == _IPV4 else str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))


class _Link(NamedTuple):
    """A connection to one of our ports."""

    fd: int
    name: str  # of the socket, as the kernel lists it
    ip: Ip
    port: int  # the other end's
    own_port: int
    since_ns: int

    @property
    def source(self) -> str:
        """The source that it counts against."""
        return source_of(self.ip)

    @property
    def received_bytes(self) -> int:
        """Bytes received over it until now."""
        return own_sockets.received_bytes(self.fd, self.name)


class _Endpoint(NamedTuple):
    """A fabric endpoint: the client that may connect there, and the kernel filter that enforces it."""

    port: int
    client: Ip
    program: bytes
    shuts: bool  # once its client has connected


class ConnectionGuard:
    """Guards a node's connections. Peers and endpoints are reported on the node's loop; the rest runs in a thread."""

    def __init__(
        self,
        clock: Clock,
        port: int,
        turned_away: Callable[[str, str, int], None],
        clients: Sequence[Network] = (),
    ) -> None:
        """`turned_away` is called, on the guard's thread, with a source, a reason and a number of connections.

        `clients` are hosts with several addresses: they may connect to an endpoint from any of these.
        """
        self._clients = clients
        self._clock = clock
        self._port = port
        self._ports = {port}  # at which sources are counted and barred
        self._turned_away = turned_away
        self._proved: dict[str, int] = {}  # by gRPC's name of a peer: when a call of it was last admitted
        self._fabric: dict[str, _Endpoint] = {}  # by its listening socket
        self._shut: set[str] = set()  # those to which nobody can connect now
        self._links: dict[str, _Link | None] = {}  # by name; None: a socket of no interest
        self._listening: dict[str, int] = {}  # port of each listening socket, by name
        self._at: dict[str, int] = {}  # its descriptor
        self._attempts: dict[str, list[int]] = {}  # by source: when it connected, or was refused a call
        self._refused: deque[str] = deque(maxlen=GUARD_ATTEMPTS_OF_SOURCE_MAX)  # peers, since the last check
        self._not_reading: deque[str] = deque(maxlen=GUARD_CONNECTIONS_OF_SOURCE_MAX)  # peers, likewise
        self._flooding: deque[str] = deque(maxlen=GUARD_REPEATS_KEPT_MAX)  # peers, since the last check
        self._repeating: deque[str] = deque(maxlen=GUARD_REPEATS_KEPT_MAX)  # peers, since the last check
        self._repeated: dict[str, list[int]] = {}  # by peer: when its calls could not wait their turn
        self._barred: dict[str, int] = {}  # until when
        self._counters = TcpCounters()
        # Connections and segments received by the machine, as last read.
        self._counts: tuple[int, int] | None = None
        # By socket: when it was first seen to have sent much without an admitted call.
        self._large_since: dict[str, int] = {}
        self._brought: dict[str, int] = {}  # by peer: bytes that its calls and messages account for
        self._beside: dict[str, int] = {}  # by socket: bytes beyond those, at the last count,
        self._counted_ns = 0  # which was then
        self._over: dict[str, int] = {}  # by source: how many of these exceed the permitted rate
        self._has_ended = False  # connections, at the last check
        self.is_busy = False  # the machine has received much since the last check
        self._unauthenticated = 0  # connections without an admitted call, at the last check
        self._expects_more = False  # an endpoint was added since then
        self._closed: dict[tuple[Ip, int], int] = {}  # peers, and when they were found to be disconnected
        self._filter_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-guard", daemon=True)

    def also_at(self, port: int) -> None:
        """Count and bar sources at this port as well."""
        self._ports.add(port)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._counters.close()

    def proved(self, peer: str) -> None:
        """Note that a call of this peer was admitted. Each call counts: its port may have a new connection by now.

        HTTP requests are not recorded: each has a new peer.
        """
        if not peer.startswith(_OF_CALLS):
            return
        self._proved[peer] = self._clock.monotonic_ns()
        self._brought[peer] = self._brought.get(peer, 0) + GUARD_CALL_BYTES

    def brought(self, peer: str, size_bytes: int) -> None:
        """Note that a message of this peer was read."""
        more = GUARD_MESSAGE_BYTES + size_bytes + size_bytes // GUARD_MESSAGE_SHARE
        self._brought[peer] = self._brought.get(peer, 0) + more

    def refused(self, peer: str) -> None:
        """Note that a call of this peer was refused."""
        self._refused.append(peer)

    def reads_nothing(self, peer: str) -> None:
        """Note that this peer has not read an answer in time: it is disconnected at the next check."""
        self._not_reading.append(peer)

    def repeats(self, peer: str) -> None:
        """Note that a call of this peer was Overloaded or cancelled in the queue; too many of these disconnect it."""
        self._repeating.append(peer)

    def floods(self, peer: str) -> None:
        """Note that this peer sent a call as costly as a hundred others: it is disconnected, and its source barred."""
        self._flooding.append(peer)
        if (place := _ip_and_port(peer)) is not None:
            self._closed[place] = self._clock.monotonic_ns()

    def has_closed(self, peer: Callable[[], str]) -> bool:
        """Whether this peer's connection has been closed here, although gRPC may still deliver calls of it."""
        return bool(self._closed) and _ip_and_port(peer()) in self._closed

    def expects(self, listener: int, client: Ip, *, shuts: bool) -> None:
        """Allow only this client at an endpoint's listening socket, from now on until the endpoint is closed.

        If it `shuts`, nobody can connect there while a connection of the client is open.
        """
        program = packet_filter.admitting(client, self._clients)
        with suppress(OSError):
            name = own_sockets.name_of(listener)
            with own_sockets.Copy(listener, name) as ours:
                if ours is not None:
                    self._attach(ours, program)
                    self._fabric[name] = _Endpoint(ours.getsockname()[1], client, program, shuts)
                    self._expects_more = True

    def barred(self) -> list[str]:
        """The sources that are barred now."""
        return list(self._barred)

    def _run(self) -> None:
        heap = Heap()
        looked_ns = trimmed_ns = 0
        wait_ms = GUARD_CHECK_MS
        while not self._stop.wait(wait_ms / 1000):
            now_ns = self._clock.monotonic_ns()
            if now_ns - trimmed_ns >= HEAP_LOOK_MS * _MS:
                trimmed_ns = now_ns
                heap.give_back()
            must = self.must_check()
            wait_ms = GUARD_CHECK_MS if must else GUARD_QUICK_CHECK_MS
            # A library may accept a peer late, but not long after anything was received.
            rests = self._counters.is_quiet or now_ns - looked_ns < GUARD_CHECK_IDLE_MS * _MS
            if rests and not must and not self.is_busy:
                continue
            looked_ns = now_ns
            self._has_ended = False
            try:
                self.check()
                if self._has_ended:
                    wait_ms = GUARD_CHECK_AGAIN_MS
            except Exception:  # without this thread the node would be unguarded, and nobody would know
                log.exception("the connections could not be checked")

    def must_check(self) -> bool:
        """Whether there is something to check: a new, unauthenticated, refused or barred peer, or a new endpoint.

        A connection that a library accepts late is found at the next regular check.
        """
        before, self._counts = self._counts, self._counters.read()
        if self._counts is None or before is None or self._counts[0] != before[0]:
            return True
        self.is_busy = self._counts[1] - before[1] > GUARD_SEGMENTS_MAX
        heard = self._refused or self._not_reading or self._repeating or self._flooding
        return bool(self._unauthenticated or heard or self._barred or self._expects_more)

    def check(self) -> None:
        """Check all sockets once, and close those that are not allowed to stay."""
        now_ns = self._clock.monotonic_ns()
        self._unauthenticated, self._expects_more = 0, False
        expected = list(self._fabric)
        new = self._list(now_ns)
        for name in expected:
            if name not in self._listening:
                self._fabric.pop(name, None)
                self._shut.discard(name)
        self._large_since = {name: at for name, at in self._large_since.items() if name in self._links}
        peers = self._peers()
        attempts = [link.source for link in new if link.own_port in self._ports]
        self._count_large(new, peers, now_ns)
        while self._refused:
            ip = ip_of_peer(self._refused.popleft())
            attempts += [] if ip is None else [source_of(ip)]
        self._end_repeating(now_ns)
        self._end_flooding(now_ns)
        self._bar(attempts, now_ns)
        self._end_not_reading()
        self._end_frames(peers, now_ns)
        for source, links in self._grouped(lambda link: link.own_port == self._port, lambda one: one.source):
            self._keep_calls(source, links, peers, now_ns)
        self._keep_fabric()
        for place, since_ns in self._closed.copy().items():
            if now_ns - since_ns > GUARD_BARRED_MS * _MS:
                self._closed.pop(place, None)
        here = {(link.ip, link.port) for link in self._links.values() if link is not None}
        # A list of pairs allocates objects that may trigger the garbage collector, and with it another thread.
        for peer, since_ns in self._proved.copy().items():
            if now_ns - since_ns > GUARD_TIMEOUT_MS * _MS and peers.get(peer) not in here:
                self._proved.pop(peer, None)
                self._brought.pop(peer, None)

    def _count_large(self, new: Iterable[_Link], peers: dict[str, tuple[Ip, int]], now_ns: int) -> None:
        """Count new connections as several, if they have sent much and no call was admitted.

        Of connections that send thousands of calls, reset them and close, few are seen.
        """
        proved = set(peers.values())
        for link in new:
            if link.own_port == self._port and (link.ip, link.port) not in proved:
                times = min(link.received_bytes // GUARD_ATTEMPT_BYTES, GUARD_ATTEMPTS_PER_NEW_MAX)
                self._count_attempts(link.source, times, now_ns)

    def _end_frames(self, peers: dict[str, tuple[Ip, int]], now_ns: int) -> None:
        """Disconnect sources that keep sending bytes that belong to no message: pings, settings, and the like."""
        passed_ns = now_ns - self._counted_ns
        if passed_ns < GUARD_QUICK_CHECK_MS * _MS:
            return
        self._counted_ns, before, self._beside = now_ns, self._beside, {}
        allowed = GUARD_FRAMES_BYTES_S * passed_ns // _S
        self._over = {source: over - allowed for source, over in self._over.items() if over > allowed}
        brought = {place: self._brought.get(peer, 0) for peer, place in peers.items()}
        calls = self._grouped(lambda link: (link.ip, link.port) in brought, lambda one: one.source)
        for source, links in calls:
            for link in links:
                self._beside[link.name] = link.received_bytes - brought[link.ip, link.port]
            more = {link.name: self._beside[link.name] - before.get(link.name, 0) for link in links}
            over = self._over.pop(source, 0) + sum(more.values())
            if over > GUARD_FRAMES_BYTES_MAX:
                mean = sum(more.values()) / len(links)
                flooding = [link for link in links if more[link.name] >= mean]
                self._hang_up(flooding)
                self._count_attempts(source, GUARD_ATTEMPTS_OF_SOURCE_MAX + 1, now_ns)
                self._turned_away(source, "connections with too many bytes outside of calls", len(flooding))
            elif over > 0:
                self._over[source] = over

    def _end_not_reading(self) -> None:
        still = set()
        while self._not_reading:
            still.add(_ip_and_port(self._not_reading.popleft()))
        ends = self._grouped(lambda link: (link.ip, link.port) in still, lambda one: one.source)
        for source, links in ends if still else ():
            self._hang_up(links)
            self._turned_away(source, "connections whose client did not read an answer in time", len(links))

    def _end_repeating(self, now_ns: int) -> None:
        while self._repeating:
            self._repeated.setdefault(self._repeating.popleft(), []).append(now_ns)
        repeating = set()
        for peer, times in list(self._repeated.items()):
            times[:] = [one for one in times if now_ns - one < GUARD_WINDOW_MS * _MS]
            if len(times) > GUARD_REPEATS_MAX:
                repeating.add(_ip_and_port(peer))
            if not times or len(times) > GUARD_REPEATS_MAX:
                del self._repeated[peer]
        ends = self._grouped(lambda link: (link.ip, link.port) in repeating, lambda one: one.source)
        for source, links in ends if repeating else ():
            self._hang_up(links)
            self._count_attempts(source, len(links) * GUARD_ATTEMPTS_PER_REPEATING, now_ns)
            self._turned_away(source, "connections that kept calling when told to wait", len(links))

    def _end_flooding(self, now_ns: int) -> None:
        floods = {_ip_and_port(self._flooding.popleft()) for _ in range(len(self._flooding))}
        for source in {source_of(one[0]) for one in floods if one is not None}.difference(self._barred):
            # The client may have disconnected and connected again since.
            self._count_attempts(source, GUARD_ATTEMPTS_OF_SOURCE_MAX + 1, now_ns)
            self._turned_away(source, "a connection that sent calls with too much metadata", 1)
        self._hang_up(link for link in self._links.values() if link and (link.ip, link.port) in floods)

    def _grouped(
        self, which: Callable[[_Link], bool], by: Callable[[_Link], T]
    ) -> Iterable[tuple[T, list[_Link]]]:
        groups: dict[T, list[_Link]] = {}
        for link in self._links.values():
            if link is not None and which(link):
                groups.setdefault(by(link), []).append(link)
        return groups.items()

    def _peers(self) -> dict[str, tuple[Ip, int]]:
        found = {}
        for peer in list(self._proved):
            place = _ip_and_port(peer)
            if place is not None:
                found[peer] = place
        return found

    def _list(self, now_ns: int) -> list[_Link]:
        """Update the known sockets; returns new connections."""
        before, self._links, self._listening, self._at = self._links, {}, {}, {}
        new = []
        for name, fd in own_sockets.listed():
            known = before.get(name)
            if name in before and (known is None or known.fd == fd):
                self._links[name] = known
                continue
            with own_sockets.Copy(fd, name) as ours:
                if ours is None:
                    continue
                link = _link(ours, fd, name, now_ns)
            if isinstance(link, _Link):
                new.append(link)
                self._closed.pop((link.ip, link.port), None)  # another one
                self._links[name] = link
            elif link is not None:
                self._listening[name], self._at[name] = link, fd  # few, so they are examined each time
            else:
                self._links[name] = None
        return new

    def _keep_calls(
        self, source: str, links: list[_Link], peers: dict[str, tuple[Ip, int]], now_ns: int
    ) -> None:
        proved = set(peers.values())
        unauthenticated = sorted(
            (link for link in links if (link.ip, link.port) not in proved), key=lambda one: one.since_ns
        )
        self._unauthenticated += len(unauthenticated)
        timeout_ms = 0 if source in self._barred else GUARD_TIMEOUT_MS
        late = [one for one in unauthenticated if now_ns - one.since_ns >= timeout_ms * _MS]
        oversized = [one for one in unauthenticated if self._is_oversized(one, now_ns)]
        self._count_attempts(source, len(oversized) * GUARD_ATTEMPTS_PER_OVERSIZED, now_ns)
        # An honest client makes a call within a moment: the oldest are closed.
        crowd = unauthenticated[: max(0, len(unauthenticated) - GUARD_UNAUTHENTICATED_OF_SOURCE_MAX)]
        gone = {one.name: one for one in (*late, *oversized, *crowd)}
        over = len(links) - len(gone) - GUARD_CONNECTIONS_OF_SOURCE_MAX
        if over > 0:
            newest = sorted((one for one in links if one.name not in gone), key=lambda one: one.since_ns)
            gone |= {one.name: one for one in newest[-over:]}
        if gone:
            self._hang_up(gone.values())
            self._turned_away(source, "connections without an accepted call, or too many", len(gone))

    def _is_oversized(self, link: _Link, now_ns: int) -> bool:
        """Whether so many bytes have arrived that a call should have been authenticated by now.

        gRPC widens the window of a new connection by itself, and the thread that admits calls may be behind.
        """
        if link.received_bytes <= GUARD_UNAUTHENTICATED_BYTES_MAX:
            return False
        since_ns = self._large_since.setdefault(link.name, now_ns)
        return now_ns - since_ns >= GUARD_UNAUTHENTICATED_BYTES_MS * _MS

    def _keep_fabric(self) -> None:
        endpoints: dict[int, list[str]] = {}  # by port: endpoints of two IP families may share one
        for name, one in self._fabric.copy().items():
            endpoints.setdefault(one.port, []).append(name)
        links = dict(self._grouped(lambda link: link.own_port in endpoints, lambda one: one.own_port))
        for port, names in endpoints.items():
            clients = {self._fabric[name].client for name in names}
            here = self._keep_clients(clients, links.get(port, []))
            for name in names:
                self._keep_shut(name, self._fabric[name], is_here=self._fabric[name].client in here)

    def _keep_clients(self, clients: set[Ip], links: list[_Link]) -> set[Ip]:
        """Disconnect all but an endpoint's clients, and excess connections of these; returns who remains."""
        own = sorted(
            (one for one in links if one.ip in clients or any(one.ip in many for many in self._clients)),
            key=lambda one: one.since_ns,
        )
        most = GUARD_FABRIC_CONNECTIONS_OF_CLIENT_MAX
        gone = [one for one in links if one not in own] + own[most:]
        if gone:
            self._hang_up(gone)
            self._turned_away(
                gone[0].source, "connections to another client's endpoint, or too many", len(gone)
            )
        return {one.ip for one in own[:most]}

    def _keep_shut(self, name: str, endpoint: _Endpoint, *, is_here: bool) -> None:
        """Close an endpoint to new connections while its client is connected."""
        shut = is_here and endpoint.shuts
        if shut == (name in self._shut) or name not in self._at:
            return
        with own_sockets.Copy(self._at[name], name) as ours:
            if ours is not None:
                self._attach(ours, packet_filter.NOBODY if shut else endpoint.program)
                (self._shut.add if shut else self._shut.discard)(name)

    def _hang_up(self, links: Iterable[_Link]) -> None:
        for link in links:
            self._has_ended = True
            self._closed[link.ip, link.port] = self._clock.monotonic_ns()
            own_sockets.end(link.fd, link.name)
            self._links[link.name] = None  # its library closes the descriptor

    def _count_attempts(self, source: str, times: int, now_ns: int) -> None:
        if times:
            self._attempts.setdefault(source, []).extend([now_ns] * times)

    def _bar(self, attempts: list[str], now_ns: int) -> None:
        since_ns = now_ns - GUARD_WINDOW_MS * _MS
        for source in attempts:
            self._count_attempts(source, 1, now_ns)
        before = set(self._barred)
        for source, times in list(self._attempts.items()):
            times[:] = [one for one in times if one >= since_ns]
            if not times:
                del self._attempts[source]
            elif (
                len(times) > GUARD_ATTEMPTS_OF_SOURCE_MAX
                and source not in self._barred
                and len(self._barred) < GUARD_BARRED_SOURCES_MAX
            ):
                self._barred[source] = now_ns + GUARD_BARRED_MS * _MS
                self._turned_away(
                    source, f"barred for {GUARD_BARRED_MS} ms: it connects too often", len(times)
                )
        for source, until_ns in list(self._barred.items()):
            if until_ns <= now_ns:
                del self._barred[source]
        if set(self._barred) != before:
            self._filter()

    def _filter(self) -> None:
        program = packet_filter.refusing(self._barred)
        for name, port in self._listening.items():
            with own_sockets.Copy(self._at[name], name) as ours:
                if ours is not None and port in self._ports:
                    self._attach(ours, program if self._barred else None)

    def _attach(self, ours: socket.socket, program: bytes | None) -> None:
        try:
            if program is None:
                packet_filter.detach(ours)
            else:
                packet_filter.attach(ours, program)
        except OSError as error:
            if not self._filter_failed and error.errno != errno.ENOENT:
                log.warning("No source can be barred on this kernel: %s.", error.strerror)
                self._filter_failed = True


def _ip_and_port(peer: str) -> tuple[Ip, int] | None:
    ip, port = ip_of_peer(peer), peer.rpartition(":")[2]
    return (ip, int(port)) if ip is not None and port.isdecimal() else None


def _link(ours: socket.socket, fd: int, name: str, now_ns: int) -> _Link | int | None:
    """A connection; the port of a listening socket; None for anything else."""
    if ours.family not in (socket.AF_INET, socket.AF_INET6) or ours.type != socket.SOCK_STREAM:
        return None
    try:
        own_port = int(ours.getsockname()[1])
        if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return own_port
        host, port = ours.getpeername()[:2]
    except OSError:  # not connected yet, or no longer
        return None
    return _Link(fd, name, ip_of(str(host).partition("%")[0]), int(port), own_port, now_ns)
