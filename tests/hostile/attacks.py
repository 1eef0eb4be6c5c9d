"""Attacks as processes: `python -m tests.hostile.attacks` forks one for each line of `[name, until, source, told]`.

Each attacks until its moment, from an address of its own, and then prints one line of JSON that says how much it did.
It is nice to others, for on a test's machine it would take the core that the node or its neighbour needs, which on a
machine of its own it would not. It is forked, so that it begins at once and not with a second of imports.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.client import Client
from kvstore.errors import KvError
from kvstore.limits import LEASE_TIMEOUT_MS, SESSION_BLOCKS_MAX
from kvstore.wire import blocks_pb2 as blocks
from kvstore.wire import blocks_pb2_grpc, kvstore_pb2_grpc
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import sessions_pb2 as sessions
from nic_offload.fabric import EventKind, Fabric
from nic_offload.memory import allocate
from nic_offload.sockaddr import SocketAddress, ip_of
from nic_offload.trigger import TriggeredPut, arm
from tests.hostile import h2
from tests.hostile.attaching import ATTACHING_ATTACKS
from tests.hostile.calling import Told, bearer, channel
from tests.hostile.frames import FRAME_ATTACKS
from tests.hostile.loops import LOOP_ATTACKS
from tests.hostile.memory import MEMORY_ATTACKS
from tests.hostile.sessions import LARGE, SESSION_ATTACKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nic_offload.fabric import Event

_ATTACH = "/kvstore.v1.KvStore/Attach"
_STREAMS = 200  # of one connection
_STAYS_S = 2.0


def resets(told: Told, until: float, source: str) -> Told:
    """HTTP/2 rapid reset, on new connections all the time."""
    streams = [1 + 2 * number for number in range(5000)]
    chunk = b"".join(h2.headers(one, _ATTACH, *bearer(told)) + h2.reset(one) for one in streams)
    sent = connections = 0
    while time.monotonic() < until:
        with suppress(OSError), h2.connected("127.0.0.1", told["port"], source, 1.0) as link:
            connections += 1
            link.sendall(chunk)
            sent += len(streams)
    return {"resets": sent, "connections": connections}


def resets_of_one(told: Told, until: float, source: str) -> Told:
    """Rapid reset on one connection, until the node closes it."""
    sent, first = 0, 1
    link = None
    while time.monotonic() < until:
        with suppress(OSError):
            if link is None:
                link, first = h2.connected("127.0.0.1", told["port"], source, 1.0), 1
            streams = range(first, first + 2000, 2)
            link.sendall(b"".join(h2.headers(one, _ATTACH, *bearer(told)) + h2.reset(one) for one in streams))
            sent, first = sent + len(streams), first + 2000
            continue
        link = None
    return {"resets": sent}


def silent_streams(told: Told, until: float, source: str) -> Told:
    """Attach streams without a first message."""
    links, refused = [], 0
    for _ in range(told["streams"] // _STREAMS):
        with suppress(OSError):
            link = h2.connected("127.0.0.1", told["port"], source, 1.0)
            link.sendall(b"".join(h2.headers(1 + 2 * one, _ATTACH, *bearer(told)) for one in range(_STREAMS)))
            links.append(link)
            continue
        refused += 1
    time.sleep(max(0.0, until - time.monotonic()))
    return {"streams": len(links) * _STREAMS, "refused": refused}


def idle(told: Told, until: float, source: str) -> Told:
    """Idle TCP connections; closed ones are opened again, open ones are counted."""
    links: dict[socket.socket, float] = {}
    begun = 0
    while time.monotonic() < until:
        while len(links) < told["connections"] and time.monotonic() < until:
            try:
                link = socket.create_connection(("127.0.0.1", told["port"]), 0.2, (source, 0))
            except OSError:
                break
            links[link] = time.monotonic()
            begun += 1
        time.sleep(0.1)
        links = {link: since for link, since in links.items() if not _ended(link)}
    return {"begun": begun, "held": sum(time.monotonic() - since > _STAYS_S for since in links.values())}


def _ended(link: socket.socket) -> bool:
    link.setblocking(False)
    try:
        while link.recv(1 << 16):  # a greeting, before the end
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def slow_http(told: Told, until: float, source: str) -> Told:
    """Connections that send their request byte by byte."""
    links: list[socket.socket] = []
    begun, text = 0, b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 4000
    while time.monotonic() < until:
        for _ in range(told["connections"] - len(links)):
            try:
                links.append(socket.create_connection(("127.0.0.1", told["port"]), 0.2, (source, 0)))
            except OSError:
                break
            begun += 1
        for link in list(links):
            try:
                link.setblocking(False)
                link.send(text[begun % len(text) :][:1])
            except OSError:
                links.remove(link)
        time.sleep(0.2)
    return {"begun": begun, "held": len(links)}


def attach_request(told: Told, address: bytes) -> pb.AttachRequest:
    more: dict[str, Any] = {name: told[name] for name in ("slots", "block_bytes_max") if name in told}
    return pb.AttachRequest(
        **({"block_bytes_max": 4096, "slots": 1} | more),
        provider="net",
        fabric_address=address,
        ack_words=1,
        ack_base=0,
        ack_key=0,
    )


def address(number: int) -> bytes:
    return SocketAddress(ip_of("127.0.0.1"), 10_000 + number).encoded


def failing_attaches(told: Told, until: float, _: str) -> Told:
    """Attaches with invalid or unreachable addresses, and with words outside of any memory."""
    stub = kvstore_pb2_grpc.KvStoreStub(channel(told))  # type: ignore[no-untyped-call]
    tried = [
        attach_request(told, address)
        for address in (
            bytes(16),
            bytes((1, *bytes(15))),
            bytes((40, *bytes(15))),
            b"",
            b"x" * 400,
            SocketAddress(ip_of("127.0.0.9"), 9).encoded,
            SocketAddress(ip_of("0.0.0.0"), 9).encoded,
        )
    ]
    refused: dict[str, int] = {}
    while time.monotonic() < until:
        for request in tried:
            try:
                next(stub.Attach(iter([request]), metadata=bearer(told), timeout=5))
            except grpc.RpcError as error:
                name = error.code().name
                refused[name] = refused.get(name, 0) + 1
    return refused


def attaches(told: Told, until: float, _: str) -> Told:
    """As many attachments as the node grants, with all the landing memory that it grants to them."""
    held: list[Any] = []
    refused: dict[str, int] = {}
    at = 0
    while time.monotonic() < until:
        at += 1
        if len(held) >= told.get("most", 1 << 30):
            time.sleep(0.1)
            continue
        stub = kvstore_pb2_grpc.KvStoreStub(channel(told, at // _STREAMS))  # type: ignore[no-untyped-call]

        def requests(
            number: int = at % 50_000,
        ) -> Iterator[Any]:
            yield attach_request(told, address(number))
            time.sleep(max(0.0, until + 5 - time.monotonic()))

        call = stub.Attach(requests(), metadata=bearer(told))
        try:
            next(call)
            held.append(call)
        except grpc.RpcError as error:
            name = error.code().name
            refused[name] = refused.get(name, 0) + 1
            time.sleep(0.01)
    return {"held": len(held), **refused}


def landing(told: Told, until: float, _: str) -> Told:
    """All landing memory that the node grants: connections with large blocks, and leases of all their slots."""
    held: list[Any] = []
    leases: deque[float] = deque()  # when each began, of those that are not over
    most = 0
    refused: dict[str, int] = {}
    while time.monotonic() < until:
        stub = kvstore_pb2_grpc.KvStoreStub(channel(told, len(held) // _STREAMS))  # type: ignore[no-untyped-call]
        request = attach_request(told | {"slots": 32, "block_bytes_max": 8 << 20}, address(len(held)))

        def requests(first: pb.AttachRequest = request) -> Iterator[Any]:
            yield first
            time.sleep(max(0.0, until + 5 - time.monotonic()))

        call = stub.Attach(requests(), metadata=bearer(told))
        try:
            number = next(call).connection
            held.append(call)
            for _slot in range(32):
                name = pb.BlockName(key=os.urandom(32), fingerprint=bytes(16), length=8 << 20)
                wanted = pb.ReserveRequest(
                    connection=number, blocks=[pb.ReserveBlock(name=name)], durability=pb.DURABILITY_WRITTEN
                )
                stub.Reserve(wanted, metadata=bearer(told), timeout=20)
                leases.append(time.monotonic())
                while leases[0] < leases[-1] - LEASE_TIMEOUT_MS / 1000:
                    leases.popleft()
                most = max(most, len(leases))
        except grpc.RpcError as error:
            name_of = error.code().name
            refused[name_of] = refused.get(name_of, 0) + 1
            time.sleep(0.2)
    return {"held": len(held), "leased_bytes": most * (8 << 20), **refused}


def heavy(told: Told, until: float, _: str) -> Told:
    """Four loops of a call with a thousand blocks."""
    stub = blocks_pb2_grpc.BlocksStub(channel(told))  # type: ignore[no-untyped-call]
    names = [
        pb.BlockName(key=os.urandom(32), fingerprint=bytes(16), length=4096) for _ in range(told["blocks"])
    ]
    made: dict[str, Callable[[], Any]] = {
        "Exists": lambda: stub.Exists.future(
            blocks.ExistsRequest(blocks=names), metadata=bearer(told), timeout=20
        ),
        "Prefix": lambda: stub.Prefix.future(
            blocks.PrefixRequest(keys=[one.key for one in names], fingerprint=bytes(16)),
            metadata=bearer(told),
        ),
        "Explain": lambda: stub.Explain.future(
            blocks.ExplainRequest(keys=[one.key for one in names]), metadata=bearer(told), timeout=20
        ),
    }
    ask = made[told["call"]]
    under_way = [ask() for _ in range(4)]
    done: dict[str, int] = {}
    while time.monotonic() < until:
        for at, call in enumerate(under_way):
            try:
                call.result()
                name = "OK"
            except grpc.RpcError as error:
                name = error.code().name
            done[name] = done.get(name, 0) + 1
            under_way[at] = ask()
    return done


def unread(told: Told, until: float, source: str) -> Told:
    """Answers of megabytes, requested on connections that answer pings and have closed flow-control windows."""
    ask = sessions.GetSessionRequest(name=LARGE, blocks=SESSION_BLOCKS_MAX).SerializeToString()
    asked, held = 0, []
    while time.monotonic() < until:
        link = h2.connected("127.0.0.1", told["port"], source)
        link.sendall(h2.no_windows())
        threading.Thread(target=h2.answer_pings, args=(link,), daemon=True).start()
        held.append(link)
        for stream in range(1, 2 * _STREAMS, 2):
            with suppress(OSError):
                call = h2.headers(stream, "/kvstore.v1.Sessions/GetSession", *bearer(told))
                link.sendall(call + h2.data(stream, ask, ends=True))
                asked += 1
        time.sleep(1.0)
    time.sleep(told["stays_s"])  # longer than an answer may lie
    return {"asked": asked}


def burn(told: Told, until: float, source: str) -> Told:
    """As many small calls as the node answers, with 200 pending on each connection."""
    path, ask = {
        "Status": ("/kvstore.v1.KvStore/Status", pb.StatusRequest()),
        "Get": (
            "/kvstore.v1.KvStore/Get",
            pb.GetRequest(name=pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=4096)),
        ),
        "Exists": (
            "/kvstore.v1.Blocks/Exists",
            blocks.ExistsRequest(blocks=[pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=4096)]),
        ),
    }[told["call"]]
    message, more = ask.SerializeToString(), bearer(told)
    links: dict[socket.socket, tuple[h2.Answers, Iterator[int]]] = {}
    done = begun = 0

    def call(streams: Iterator[int], calls: int) -> bytes:
        return b"".join(
            h2.headers(one, path, *more) + h2.data(one, message, ends=True) for one in islice(streams, calls)
        )

    while time.monotonic() < until:
        while len(links) < told["connections"]:
            try:
                link = h2.connected("127.0.0.1", told["port"], source, 1.0)
                answers, streams = h2.Answers(link), iter(range(1, 1 << 31, 2))
                link.setblocking(True)
                link.sendall(call(streams, _STREAMS))
                link.setblocking(False)
            except OSError:
                time.sleep(0.1)
                break
            links[link] = answers, streams
            begun += 1
        for link in select.select(list(links), [], [], 0.1)[0]:
            answers, streams = links[link]
            try:
                ended = len(answers.ended())
                link.sendall(call(streams, ended))
                done += ended
            except OSError:
                del links[link]
                link.close()
    return {"done": done, "begun": begun, "held": len(links)}


_HALF = 8 << 20  # bytes of a message whose last one never comes


def half_sent(told: Told, until: float, source: str) -> Told:
    """Messages of megabytes without their last byte: as much of each as the node accepts."""
    begun = sent = 0
    links: dict[socket.socket, tuple[h2.Answers, dict[int, int]]] = {}
    while time.monotonic() < until:
        if len(links) < told["connections"]:
            with suppress(OSError):
                link, answers, calls = _halves(told, source)
                links[link] = answers, calls
                begun += len(calls)
        for link, (answers, calls) in list(links.items()):
            try:
                sent += _send_more(link, answers, calls)
            except OSError:
                del links[link]
                link.close()
        time.sleep(0.005)
    return {"begun": begun, "sent": sent}


def _halves(told: Told, source: str) -> tuple[socket.socket, h2.Answers, dict[int, int]]:
    """An accepted connection, and how much of each of its calls was sent."""
    link, first = h2.connected("127.0.0.1", told["port"], source, 1.0), h2.half(_HALF)
    link.sendall(h2.headers(1, "/kvstore.v1.KvStore/Status", *bearer(told)) + h2.data(1, b"", ends=True))
    calls = {stream: len(first) for stream in range(3, _STREAMS, 2)}
    for stream in calls:
        link.sendall(h2.headers(stream, told["path"], *bearer(told)) + h2.more(stream, first))
    answers = h2.Answers(link)
    answers.window -= len(first) * len(calls) + 5
    return link, answers, calls


def _send_more(link: socket.socket, answers: h2.Answers, calls: dict[int, int]) -> int:
    for stream in answers.ended():
        calls.pop(stream, None)
    link.settimeout(0.2)
    sent = 0
    for stream, had in calls.items():
        room = 65_535 + answers.windows.get(stream, 0) - had
        some = min(room, answers.window, 1 << 14, _HALF - had)
        if some > 0:
            link.sendall(h2.more(stream, bytes(some)))
            calls[stream] += some
            answers.window -= some
            sent += some
    link.setblocking(False)
    return sent


def flood(told: Told, until: float, _: str) -> Told:
    """Puts and gets of large blocks over many connections, to fill the drive's queue and all memory for blocks."""
    done: dict[str, int] = {}
    size_bytes = 1 << 20

    def work() -> None:
        with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
            while time.monotonic() < until:
                key = os.urandom(32)
                try:
                    client.put_inline(key, key * (size_bytes // 32))
                    name = type(client.get_inline(key, size_bytes)).__name__
                except KvError as error:
                    name = type(error).__name__
                done[name] = done.get(name, 0) + 1

    working = [threading.Thread(target=work) for _ in range(told["connections"])]
    for one in working:
        one.start()
    for one in working:
        one.join()
    return done


def unknown(told: Told, until: float, _: str) -> Told:
    """Calls without a token or with an unknown one, as fast as possible."""
    stub = kvstore_pb2_grpc.KvStoreStub(channel(told))  # type: ignore[no-untyped-call]
    refused: dict[str, int] = {}
    while time.monotonic() < until:
        try:
            stub.Status(pb.StatusRequest(), metadata=bearer(told), timeout=5)
        except grpc.RpcError as error:
            name = error.code().name
            refused[name] = refused.get(name, 0) + 1
    return refused


def forge(told: Told, until: float, _: str) -> Told:
    """Writes to a client over the fabric, with valid keys of its memory, from its own address, at full speed."""
    did = {"landed": 0, "refused": 0}
    fabric = Fabric(told["provider"], address="127.0.0.1")
    endpoint, memory = fabric.open_endpoint(), allocate(1 << 20)
    region = fabric.register(memory, remote_write=False)
    peer = fabric.add_peer(bytes.fromhex(told["client"]))
    tags = count(1)
    while time.monotonic() < until:
        for target, key, written in told["writes"]:
            data, tag = bytes.fromhex(written), next(tags)
            memory[: len(data)] = data
            arm(fabric, [TriggeredPut(tag, endpoint, peer, region, region.address, len(data), target, key)])
            ended: list[Event] = []
            while not ended and time.monotonic() < until:
                ended = [one for one in fabric.reap() if one.tag == tag]
            for one in ended:
                did["landed" if one.kind == EventKind.DONE else "refused"] += 1
    return did


ATTACKS: dict[str, Callable[[Told, float, str], Told]] = (
    {
        one.__name__: one
        for one in (
            resets,
            resets_of_one,
            silent_streams,
            idle,
            slow_http,
            failing_attaches,
            attaches,
            landing,
            heavy,
            unread,
            burn,
            half_sent,
            flood,
            unknown,
            forge,
        )
    }
    | MEMORY_ATTACKS
    | SESSION_ATTACKS
    | FRAME_ATTACKS
    | LOOP_ATTACKS
    | ATTACHING_ATTACKS
)


def _attack(name: str, until: float, source: str, told: Told) -> None:
    try:
        print(json.dumps(ATTACKS[name](told, until, source)), flush=True)  # noqa: T201 - what it is asked for
    except BaseException:  # noqa: BLE001 - or a fork would go on as its parent
        traceback.print_exc()
        print(flush=True)  # noqa: T201 - so that nobody waits for a report
    os._exit(0)  # what is held goes with the process


if __name__ == "__main__":
    os.nice(19)
    print("ready", flush=True)  # noqa: T201 - what starts them waits for it
    for line in sys.stdin:
        if not (child := os.fork()):
            _attack(*json.loads(line))
        os.waitpid(child, 0)
