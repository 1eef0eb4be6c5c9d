"""The connection guard: which connections are closed, which stay, and what the kernel's filter admits."""

from __future__ import annotations

import gc
import socket
import struct
from contextlib import ExitStack
from ipaddress import ip_address, ip_network
from itertools import count
from typing import TYPE_CHECKING

import pytest

from kvstore.clock import SystemClock
from kvstore.limits import (
    GUARD_ATTEMPT_BYTES,
    GUARD_ATTEMPTS_OF_SOURCE_MAX,
    GUARD_ATTEMPTS_PER_NEW_MAX,
    GUARD_ATTEMPTS_PER_REPEATING,
    GUARD_BARRED_MS,
    GUARD_BARRED_SOURCES_MAX,
    GUARD_CHECK_AGAIN_MS,
    GUARD_CHECK_MS,
    GUARD_FABRIC_CONNECTIONS_OF_CLIENT_MAX,
    GUARD_QUICK_CHECK_MS,
    GUARD_REPEATS_MAX,
    GUARD_SEGMENTS_MAX,
    GUARD_TIMEOUT_MS,
    GUARD_UNAUTHENTICATED_BYTES_MAX,
    GUARD_UNAUTHENTICATED_BYTES_MS,
    GUARD_UNAUTHENTICATED_OF_SOURCE_MAX,
    GUARD_WINDOW_MS,
)
from kvstore.node import connection_guard
from kvstore.node.connection_guard import ConnectionGuard, source_of
from kvstore.node.packet_filter import NOBODY, admitting, refusing
from kvstore.node.tcp_counters import QUIET_READS, TcpCounters

if TYPE_CHECKING:
    from collections.abc import Iterator

MS = 1_000_000
HERE, THERE = "127.0.0.1", "127.0.0.7"


class Clock(SystemClock):
    now_ns = 1_000_000 * MS

    def monotonic_ns(self) -> int:
        return self.now_ns


class GuardRig:
    """A listener of this process, its guard, and its clients."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.clock = Clock()
        self.listener = undo.enter_context(socket.create_server((HERE, 0), backlog=1024))
        self.port = self.listener.getsockname()[1]
        self.told: list[tuple[str, str, int]] = []
        self.all_theirs: list[socket.socket] = []
        self.guard = ConnectionGuard(self.clock, self.port, lambda *one: self.told.append(one))

    def come(self, source: str = HERE, timeout_s: float = 5.0) -> socket.socket:
        ours = socket.create_connection((HERE, self.port), timeout_s, (source, 0))
        self._undo.enter_context(ours)
        self.theirs = self._undo.enter_context(self.listener.accept()[0])
        self.all_theirs.append(self.theirs)
        return ours

    def check(self, later_ms: int = 0) -> None:
        self.clock.now_ns += later_ms * MS
        self.guard.check()


@pytest.fixture
def rig() -> Iterator[GuardRig]:
    with ExitStack() as undo:
        yield GuardRig(undo)


def stays(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        return link.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def peer(link: socket.socket) -> str:
    host, port = link.getsockname()
    return f"ipv4:{host}:{port}"


def test_a_connection_without_an_admitted_call_times_out_and_one_with_a_call_stays(
    rig: GuardRig,
) -> None:
    silent, honest = rig.come(), rig.come()
    rig.guard.proved(peer(honest))
    rig.check()
    rig.check(GUARD_TIMEOUT_MS - 1)
    assert stays(silent)
    rig.check(2)
    assert not stays(silent)
    rig.check(100 * GUARD_TIMEOUT_MS)
    assert stays(honest)
    assert [(source, count) for source, _, count in rig.told] == [(HERE, 1)]


def test_what_a_disconnected_peer_has_sent_is_not_worked_through(rig: GuardRig) -> None:
    """A library reads all that has arrived before it sees the end: of thousands of calls a second's work."""
    flooding = rig.come()
    rig.theirs.setblocking(False)
    flooding.sendall(bytes(500 << 10))
    rig.check()
    rig.check(GUARD_TIMEOUT_MS)
    assert rig.theirs.recv(1) == b""


def test_after_it_has_ended_connections_the_guard_checks_again_sooner(
    rig: GuardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that their peer made before it was barred are accepted then."""
    waits: list[int] = []

    class Stop:
        def wait(self, seconds: float) -> bool:
            waits.append(round(1000 * seconds))
            rig.clock.now_ns += GUARD_TIMEOUT_MS * MS
            return len(waits) > 3

    monkeypatch.setattr(rig.guard, "_stop", Stop())
    rig.guard.proved(peer(rig.come()))
    silent = rig.come()
    rig.guard._run()
    assert not stays(silent)
    assert waits == [GUARD_CHECK_MS, GUARD_CHECK_MS, GUARD_CHECK_AGAIN_MS, GUARD_CHECK_MS]


def test_a_check_tolerates_calls_admitted_during_it(rig: GuardRig) -> None:
    """Another thread may run when the collector does; such a check was once abandoned, and barred nobody."""
    ports = count(1)

    def let_in(*_: object) -> None:
        rig.guard.proved(f"ipv4:{HERE}:{next(ports)}")
        rig.guard.floods(f"ipv4:{THERE}:{next(ports)}")

    for _ in range(1000):
        let_in()
    thresholds = gc.get_threshold()
    gc.callbacks.append(let_in)
    gc.set_threshold(1)
    try:
        rig.check()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_in)


def test_http_requests_are_not_remembered(rig: GuardRig) -> None:
    """Each has a peer of its own: thousands a second would be examined at each check."""
    rig.guard.proved(f"http:{HERE}:5")
    assert not rig.guard._proved
    assert not rig.guard._brought


def test_an_authenticated_caller_that_reads_no_answer_is_disconnected_at_the_next_check(
    rig: GuardRig,
) -> None:
    still, honest = rig.come(), rig.come()
    for link in (still, honest):
        rig.guard.proved(peer(link))
    rig.check()
    rig.guard.reads_nothing(peer(still))
    assert rig.guard.must_check()
    rig.check()
    assert (stays(still), stays(honest)) == (False, True)
    assert [(source, count) for source, _, count in rig.told] == [(HERE, 1)]


def test_a_caller_that_ignores_overloaded_is_disconnected_and_its_source_barred_the_next_time(
    rig: GuardRig,
) -> None:
    repeats, waits = rig.come(), rig.come()
    for link in (repeats, waits):
        rig.guard.proved(peer(link))
        rig.guard.repeats(peer(link))
    rig.check()
    for _ in range(GUARD_REPEATS_MAX):
        rig.guard.repeats(peer(repeats))
    assert rig.guard.must_check()
    rig.check(1)
    assert (stays(repeats), stays(waits)) == (False, True)
    for _ in range(GUARD_REPEATS_MAX):  # in a time in which it may
        rig.check(GUARD_WINDOW_MS // 4)
        rig.guard.repeats(peer(waits))
    rig.check()
    assert stays(waits)
    again = [rig.come(THERE) for _ in range(GUARD_ATTEMPTS_OF_SOURCE_MAX // GUARD_ATTEMPTS_PER_REPEATING + 1)]
    for link in again:
        rig.guard.proved(peer(link))
        for _ in range(GUARD_REPEATS_MAX + 1):
            rig.guard.repeats(peer(link))
    rig.check()
    assert not any(map(stays, again))
    assert rig.guard.barred() == [THERE]


def test_the_oldest_of_many_connections_of_one_source_are_closed_and_other_sources_stay(
    rig: GuardRig,
) -> None:
    other = rig.come(HERE)
    crowd = []
    for _ in range(GUARD_UNAUTHENTICATED_OF_SOURCE_MAX + 3):
        crowd.append(rig.come(THERE))
        rig.check(1)
    assert [stays(one) for one in crowd] == [False] * 3 + [True] * GUARD_UNAUTHENTICATED_OF_SOURCE_MAX
    assert stays(other)


def test_a_caller_that_sends_much_without_a_token_is_soon_disconnected(rig: GuardRig) -> None:
    def loud_one() -> socket.socket:
        link = rig.come()
        for _ in range(GUARD_UNAUTHENTICATED_BYTES_MAX // 1024 + 1):
            link.sendall(bytes(1024))
            assert rig.theirs.recv(1024, socket.MSG_WAITALL)
        return link

    loud, proved, late = loud_one(), loud_one(), loud_one()
    rig.guard.proved(peer(proved))
    rig.check()
    rig.check(GUARD_UNAUTHENTICATED_BYTES_MS - 1)
    assert all(map(stays, (loud, proved, late)))
    rig.guard.proved(peer(late))  # the node was busy
    rig.check(1)
    assert not stays(loud)
    assert stays(proved)
    assert stays(late)


def test_new_connections_that_send_much_at_once_count_as_several(rig: GuardRig) -> None:
    """A source that resets thousands of calls and leaves is seldom seen."""

    def bring_much(host: str, *, is_proved: bool) -> None:
        link = rig.come(host)
        for _ in range(GUARD_ATTEMPTS_PER_NEW_MAX * GUARD_ATTEMPT_BYTES // 1024 + 1):
            link.sendall(bytes(1024))
            assert rig.theirs.recv(1024, socket.MSG_WAITALL)
        if is_proved:
            rig.guard.proved(peer(link))
        rig.check(1)

    enough = GUARD_ATTEMPTS_OF_SOURCE_MAX // (1 + GUARD_ATTEMPTS_PER_NEW_MAX)
    for _ in range(enough + 3):
        bring_much(THERE, is_proved=True)
    for _ in range(enough):
        bring_much(HERE, is_proved=False)
    assert rig.guard.barred() == []
    bring_much(HERE, is_proved=False)
    assert rig.guard.barred() == [HERE]


def test_a_flood_outside_of_calls_is_disconnected_and_its_source_barred(
    rig: GuardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 256 << 10
    monkeypatch.setattr(connection_guard, "GUARD_FRAMES_BYTES_MAX", many - 1)
    monkeypatch.setattr(connection_guard, "GUARD_FRAMES_BYTES_S", many)
    frames, blocks, other = rig.come(), rig.come(), rig.come(THERE)
    theirs = {}
    for link, its in zip((frames, blocks, other), rig.all_theirs, strict=True):
        rig.guard.proved(peer(link))
        theirs[link] = its

    def send(link: socket.socket, size_bytes: int) -> None:
        for _ in range(size_bytes // 1024):
            link.sendall(bytes(1024))
            assert theirs[link].recv(1024, socket.MSG_WAITALL)

    rig.check()
    for _ in range(3):  # of blocks it may send as many as it likes
        send(blocks, 2 * many)
        rig.guard.brought(peer(blocks), 2 * many)
        send(other, many // 2)
        rig.check(GUARD_QUICK_CHECK_MS)
    assert all(map(stays, (frames, blocks, other)))
    for _ in range(2):  # neither alone is too much
        assert stays(frames)
        send(frames, many - 1024)
        rig.check(GUARD_QUICK_CHECK_MS)
    assert [stays(one) for one in (frames, blocks, other)] == [False, True, True]
    rig.check()
    assert rig.guard.barred() == [HERE]


def test_an_incoming_message_counts_only_until_it_is_read(
    rig: GuardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = 64 << 10
    monkeypatch.setattr(connection_guard, "GUARD_FRAMES_BYTES_MAX", size_bytes)
    monkeypatch.setattr(connection_guard, "GUARD_FRAMES_BYTES_S", 0)
    link = rig.come()
    rig.guard.proved(peer(link))
    for _ in range(3):
        for _ in range(size_bytes // 1024):
            link.sendall(bytes(1024))
            assert rig.theirs.recv(1024, socket.MSG_WAITALL)
        rig.check(GUARD_QUICK_CHECK_MS)
        assert stays(link)
        rig.guard.brought(peer(link), size_bytes)
        rig.check(GUARD_QUICK_CHECK_MS)
    assert stays(link)


def test_a_peer_that_reuses_a_port_is_admitted_again(rig: GuardRig) -> None:
    with socket.socket() as link:
        link.bind((HERE, 0))
        rig.guard.proved(peer(link))  # over a connection that has gone
        rig.check(GUARD_TIMEOUT_MS)
        rig.guard.proved(peer(link))  # over one that no look has seen yet
        rig.check(1)
        link.connect((HERE, rig.port))
        theirs, _ = rig.listener.accept()
        with theirs:
            rig.check()
            rig.check(2 * GUARD_TIMEOUT_MS)
            assert stays(link)


def test_only_a_source_that_connects_too_often_is_barred_by_the_kernel_for_a_time(rig: GuardRig) -> None:
    for _ in range(GUARD_ATTEMPTS_OF_SOURCE_MAX + 1):
        rig.come(THERE)
    rig.check()
    assert rig.guard.barred() == [THERE]
    with pytest.raises(TimeoutError):
        socket.create_connection((HERE, rig.port), 0.3, (THERE, 0))
    rig.come(HERE)
    rig.check(GUARD_BARRED_MS + 1)
    assert rig.guard.barred() == []
    rig.come(THERE)


def test_refused_calls_count_as_attempts(rig: GuardRig) -> None:
    link = rig.come(THERE)
    for _ in range(GUARD_ATTEMPTS_OF_SOURCE_MAX + 1):
        rig.guard.refused(peer(link))
    rig.check()
    rig.guard.refused(peer(link))
    rig.check()
    assert rig.guard.barred() == [THERE]
    assert not stays(link)


def test_calls_of_a_closed_connection_count_as_its_own_until_the_port_is_reused(rig: GuardRig) -> None:
    """More of them had been accepted than the one that closed it."""

    def has_closed(name: str) -> bool:
        return rig.guard.has_closed(lambda: name)

    floods, honest, late = rig.come(THERE), rig.come(), rig.come()
    rig.guard.proved(peer(honest))
    rig.check()
    name = peer(floods)
    rig.guard.floods(name)
    assert has_closed(name)  # at once: each such call takes milliseconds
    rig.check(GUARD_TIMEOUT_MS)
    assert [has_closed(peer(link)) for link in (floods, late, honest)] == [True, True, False]
    place = late.getsockname()
    late.close()
    rig.theirs.close()
    with socket.create_connection((HERE, rig.port), 5.0, place) as again, rig.listener.accept()[0]:
        rig.check()
        assert not has_closed(peer(again))
    rig.check(GUARD_BARRED_MS + 1)
    assert not has_closed(name)


def test_a_call_with_too_much_metadata_ends_its_connection_and_bars_its_source(rig: GuardRig) -> None:
    floods, gone, honest = rig.come(THERE), rig.come(THERE), rig.come()
    for link in (floods, honest):
        rig.guard.proved(peer(link))
    for link in (floods, gone):
        rig.guard.floods(peer(link))
    gone.close()
    assert rig.guard.must_check()
    rig.check()
    assert (stays(floods), stays(honest)) == (False, True)
    assert rig.guard.barred() == [THERE]


class Endpoint:
    """A fabric endpoint's listening socket, and the connections that it accepts."""

    def __init__(self, rig: GuardRig, undo: ExitStack, *, shuts: bool = False) -> None:
        self._undo, self.port = undo, 0
        self.listener = undo.enter_context(socket.create_server((HERE, 0)))
        self.port = self.listener.getsockname()[1]
        self.theirs: list[socket.socket] = []
        rig.guard.expects(self.listener.fileno(), ip_address(HERE), shuts=shuts)

    def come(self, source: str, timeout_s: float = 5.0) -> socket.socket:
        ours = self._undo.enter_context(socket.create_connection((HERE, self.port), timeout_s, (source, 0)))
        self.theirs.append(self._undo.enter_context(self.listener.accept()[0]))
        return ours

    def is_open_to(self, source: str) -> bool:
        try:
            self.come(source, 0.2)
        except TimeoutError:
            return False
        return True


def test_only_its_client_connects_to_an_endpoint(rig: GuardRig) -> None:
    with ExitStack() as undo:
        endpoint = Endpoint(rig, undo)
        assert not endpoint.is_open_to(THERE), "it is not even let in for a moment"
        own = []
        for _ in range(GUARD_FABRIC_CONNECTIONS_OF_CLIENT_MAX + 2):
            own.append(endpoint.come(HERE))
            rig.check(1)
        assert [stays(one) for one in own] == [True] * GUARD_FABRIC_CONNECTIONS_OF_CLIENT_MAX + [False] * 2
        rig.guard._clients = (ip_network("127.0.0.0/28"),)  # of a host that has several
        several = Endpoint(rig, undo)
        assert several.is_open_to(THERE)


def test_a_peer_that_connected_to_an_endpoint_before_its_filter_is_disconnected(rig: GuardRig) -> None:
    with ExitStack() as undo, socket.create_server((HERE, 0)) as listener:
        undo.enter_context(socket.create_connection(listener.getsockname(), 5.0, (THERE, 0)))
        foreign = undo.enter_context(listener.accept()[0])
        rig.guard.expects(listener.fileno(), ip_address(HERE), shuts=False)
        rig.check()
        assert not stays(foreign)
        assert source_of(ip_address(THERE)) in {source for source, _, _ in rig.told}


def test_an_endpoint_in_use_admits_nobody_else_until_its_client_has_left(rig: GuardRig) -> None:
    with ExitStack() as undo:
        endpoint, other = Endpoint(rig, undo, shuts=True), Endpoint(rig, undo, shuts=True)
        client = endpoint.come(HERE)
        rig.check()
        assert stays(client)
        assert not endpoint.is_open_to(HERE)
        assert other.is_open_to(HERE)
        client.close()
        endpoint.theirs[0].close()
        rig.check()
        assert endpoint.is_open_to(HERE)


def passes(program: bytes, text: str) -> bool:
    """Whether the packet filter passes a packet from this address."""
    ip, steps = ip_address(text), list(struct.iter_unpack("=HBBI", program))
    packet = bytearray(40)
    packet[0] = ip.version << 4
    start = 12 if ip.version == 4 else 8
    packet[start : start + len(ip.packed)] = ip.packed
    at = register = 0
    while True:
        code, if_so, if_not, value = steps[at]
        at += 1
        if code == 0x30:
            register = packet[value - 0xFFF00000]
        elif code == 0x20:
            register = int.from_bytes(packet[value - 0xFFF00000 :][:4], "big")
        elif code == 0x74:
            register >>= value
        elif code == 0x54:
            register &= value
        elif code == 0x15:
            at += if_so if register == value else if_not
        elif code == 0x05:
            at += value
        else:
            return bool(value)


@pytest.mark.parametrize("many", [1, 200])
def test_a_filter_refuses_exactly_the_barred_sources(many: int) -> None:
    program = refusing(
        [f"10.0.{at >> 8}.{at & 255}" for at in range(many)]
        + [f"2001:db8:0:{at:x}::/64" for at in range(many)]
    )
    assert not passes(program, f"10.0.0.{many - 1}")
    assert not passes(program, f"2001:db8:0:{many - 1:x}::77")
    assert not passes(program, "2001:db8::1")
    assert passes(program, "10.1.0.0")
    assert passes(program, "2001:db8:1::1")
    assert passes(program, "2001:db9::1")


def test_the_kernel_accepts_a_filter_of_the_maximum_number_of_barred_sources() -> None:
    assert len(refusing(f"2001:db8:{at:x}::/64" for at in range(GUARD_BARRED_SOURCES_MAX))) <= 4096 * 8


@pytest.mark.parametrize(
    ("client", "others"),
    [
        ("10.0.0.7", ["10.0.0.6", "10.0.1.7", "0.0.0.0", "fd00::7", "::ffff:10.0.0.7"]),
        ("fd00::1:7", ["fd00::1:6", "fd00::7", "fd00:0:0:1::1:7", "10.0.0.7", "fe00::1:7"]),
    ],
)
def test_a_filter_admits_a_client_and_the_networks_of_several_and_nobody_else(
    client: str, others: list[str]
) -> None:
    alone = admitting(ip_address(client), [])
    assert passes(alone, client)
    assert [one for one in others if passes(alone, one)] == []
    networks = [
        ip_network("192.168.16.0/20"),
        ip_network("2001:db8:0:c000::/50"),
        ip_network("172.16.0.1/32"),
    ]
    several = admitting(ip_address(client), networks)
    within = ["192.168.16.0", "192.168.31.255", "2001:db8:0:ffff::1", "172.16.0.1", client]
    assert [one for one in within if not passes(several, one)] == []
    beside = ["192.168.15.255", "192.168.32.0", "2001:db8:0:bfff::1", "2001:db8:1:c000::1", "172.16.0.2"]
    assert [one for one in (*beside, *others) if passes(several, one)] == []
    assert not passes(NOBODY, client)
    assert passes(admitting(ip_address(client), [ip_network("0.0.0.0/0"), ip_network("::/0")]), others[0])


def test_a_source_is_an_ipv4_address_or_an_ipv6_network() -> None:
    assert source_of(ip_address("10.1.2.3")) == "10.1.2.3"
    assert source_of(ip_address("2001:db8:1:2:3::4")) == "2001:db8:1:2::/64"


def test_an_accepted_connection_is_counted_and_a_closed_file_counts_nothing() -> None:
    counters = TcpCounters()
    before = counters.read()
    assert before is not None
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        after = counters.read()
        assert after is not None
        assert after[0] > before[0]
        assert after[1] > before[1]
    counters.close()
    counters.close()
    assert counters.read() is None


def test_counters_are_quiet_once_nothing_was_received_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, now = TcpCounters(), (7, 100)
    monkeypatch.setattr(counters, "_read", lambda: now)
    for _ in range(QUIET_READS):
        counters.read()
        assert not counters.is_quiet
    counters.read()
    assert counters.is_quiet
    now = (7, 101)
    counters.read()
    assert not counters.is_quiet, "a segment was received"
    counters.close()


def test_the_guard_checks_while_a_peer_is_new_unauthenticated_refused_or_barred(
    rig: GuardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[tuple[int, int] | None] = [(7, 0)]
    monkeypatch.setattr(TcpCounters, "read", lambda _: counts[0])
    guard = rig.guard
    assert guard.must_check()
    rig.check()
    assert not guard.must_check()
    counts[0] = 8, 0
    assert guard.must_check()
    assert not guard.must_check()
    assert not guard.is_busy
    counts[0] = 8, GUARD_SEGMENTS_MAX + 1
    assert not guard.must_check()
    assert guard.is_busy, "connections that were let in bring much"
    link = rig.come()
    rig.check()
    assert guard.must_check(), "a peer that has not authenticated is still pending"
    guard.proved(peer(link))
    rig.check()
    assert not guard.must_check()
    guard.refused("ipv4:127.0.0.7:9")
    assert guard.must_check()
    rig.check()
    assert not guard.must_check()
    with socket.create_server((HERE, 0)) as endpoint:
        guard.expects(endpoint.fileno(), ip_address(HERE), shuts=False)
        assert guard.must_check()
        rig.check()
    for _ in range(GUARD_ATTEMPTS_OF_SOURCE_MAX + 1):
        guard.refused("ipv4:127.0.0.7:9")
        rig.check()
    assert guard.barred() == ["127.0.0.7"]
    assert guard.must_check()
    rig.check(GUARD_BARRED_MS)
    assert not guard.must_check()
    counts[0] = None
    assert guard.must_check(), "a kernel that doesn't tell of connections"
