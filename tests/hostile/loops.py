"""Loops of calls, each of them allowed, as programs of `tests.hostile.attacks`."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client import Client
from kvstore.limits import BATCH_BLOCKS_MAX, SESSION_BLOCKS_MAX
from kvstore.wire import blocks_pb2 as blocks
from kvstore.wire import (
    blocks_pb2_grpc,
    erasing_pb2_grpc,
    kvstore_pb2_grpc,
    lookups_pb2_grpc,
    observing_pb2_grpc,
    sessions_pb2_grpc,
    steps_pb2_grpc,
)
from kvstore.wire import erasing_pb2 as erasing
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import lookups_pb2 as lookups
from kvstore.wire import observing_pb2 as observing
from kvstore.wire import sessions_pb2 as sessions
from kvstore.wire import steps_pb2 as steps
from tests.hostile.calling import Told, all_at_once, bearer, call_all, channel
from tests.hostile.sessions import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LOOP_ATTACKS"]

_LOOPS = ["1", "2", "3", "4"]
_UNDER_WAY = 64
_KEYS = [number.to_bytes(32) for number in range(BATCH_BLOCKS_MAX)]


def _put_all(told: Told) -> None:
    with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
        client.put_many_inline((key, key) for key in _KEYS)


def protects(told: Told, until: float, _: str) -> Told:
    """Two loops that protect the longest possible session, and end the protection."""
    stub, done = sessions_pb2_grpc.SessionsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(_: str) -> None:
        while time.monotonic() < until:
            calls = (
                (stub.ProtectSession, sessions.ProtectSessionRequest(name=LARGE)),
                (stub.UnprotectSession, sessions.UnprotectSessionRequest(name=LARGE)),
            )
            call_all(calls, told, done)

    all_at_once(work, ["1", "2"])
    return done


def ends(told: Told, until: float, _: str) -> Told:
    """Many forks of the longest possible session, which all expire at the same time."""
    stub, done = sessions_pb2_grpc.SessionsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]
    while time.monotonic() < until:
        names = [sessions.SessionName(user=LARGE.user, session=f"end {one}") for one in range(32)]
        call_all(
            [(stub.ForkSession, sessions.ForkSessionRequest(source=LARGE, name=one)) for one in names],
            told,
            done,
        )
        for left, one in zip(range(len(names), 0, -1), names, strict=True):
            limit = sessions.LimitSessionRequest(name=one, time_to_live_ms=20 * left)
            call_all([(stub.LimitSession, limit)], told, done)
    return done


def prefetches(told: Told, until: float, _: str) -> Told:
    """Four loops that prefetch the longest possible session."""
    stub, done = sessions_pb2_grpc.SessionsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(_: str) -> None:
        while time.monotonic() < until:
            call_all([(stub.PrefetchSession, sessions.PrefetchSessionRequest(name=LARGE))], told, done)

    all_at_once(work, _LOOPS)
    return done


def pins(told: Told, until: float, _: str) -> Told:
    """Four loops that pin a thousand blocks, many pins at a time, and end them."""
    _put_all(told)
    stub, done = blocks_pb2_grpc.BlocksStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(_: str) -> None:
        while time.monotonic() < until:
            pinned = []
            for _one in range(16):
                try:
                    wanted = blocks.PinRequest(keys=_KEYS, time_to_live_ms=60_000)
                    pinned.append(stub.Pin(wanted, metadata=bearer(told), timeout=20).pin)
                    ended = "OK"
                except grpc.RpcError as error:
                    ended = error.code().name
                done[ended] = done.get(ended, 0) + 1
            call_all([(stub.Unpin, blocks.UnpinRequest(pins=pinned))], told, done)

    all_at_once(work, _LOOPS)
    return done


def deletes(told: Told, until: float, _: str) -> Told:
    """Four loops that put a thousand blocks and delete them with one call."""
    stub, done = blocks_pb2_grpc.BlocksStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(_: str) -> None:
        with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
            while time.monotonic() < until:
                keys = [os.urandom(32) for _ in range(BATCH_BLOCKS_MAX)]
                client.put_many_inline((key, key) for key in keys)
                call_all([(stub.Delete, blocks.DeleteRequest(keys=keys))], told, done)

    all_at_once(work, _LOOPS)
    return done


def tiny_puts(told: Told, until: float, _: str) -> Told:
    """Four loops that put a thousand tiny blocks with one call."""
    done = {"OK": 0}

    def work(_: str) -> None:
        with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
            while time.monotonic() < until:
                keys = [os.urandom(32) for _ in range(BATCH_BLOCKS_MAX)]
                client.put_many_inline((key, key) for key in keys)
                done["OK"] += 1

    all_at_once(work, _LOOPS)
    return done


def cancels(told: Told, until: float, _: str) -> Told:
    """Calls of all kinds that are cancelled at once, many at a time."""
    link = channel(told)
    kv, of_blocks = kvstore_pb2_grpc.KvStoreStub(link), blocks_pb2_grpc.BlocksStub(link)  # type: ignore[no-untyped-call]
    of_sessions = sessions_pb2_grpc.SessionsStub(link)  # type: ignore[no-untyped-call]
    names = [pb.BlockName(key=key, fingerprint=bytes(16), length=4096) for key in _KEYS]
    made: tuple[Callable[[], Any], ...] = (
        lambda: of_blocks.Exists.future(blocks.ExistsRequest(blocks=names), metadata=bearer(told)),
        lambda: of_blocks.Pin.future(blocks.PinRequest(keys=_KEYS), metadata=bearer(told)),
        lambda: of_sessions.GetSession.future(
            sessions.GetSessionRequest(name=LARGE, blocks=SESSION_BLOCKS_MAX), metadata=bearer(told)
        ),
        lambda: of_sessions.PrefetchSession.future(
            sessions.PrefetchSessionRequest(name=LARGE), metadata=bearer(told)
        ),
        lambda: kv.Get(pb.GetRequest(name=names[0]), metadata=bearer(told)),
        lambda: kv.Status.future(pb.StatusRequest(), metadata=bearer(told)),
    )
    done, at = 0, 0
    while time.monotonic() < until:
        under_way = []
        for _one in range(_UNDER_WAY):
            under_way.append(made[at % len(made)]())
            at += 1
        time.sleep(0.001 * (at % 7))
        for call in under_way:
            call.cancel()
        done += len(under_way)
    return {"cancelled": done}


def watches(told: Told, until: float, _: str) -> Told:
    """As many watches as the node accepts, never read, while blocks are put and removed."""
    stub = observing_pb2_grpc.ObservingStub(channel(told))  # type: ignore[no-untyped-call]
    held = [stub.Watch(observing.WatchRequest(), metadata=bearer(told)) for _ in range(16)]
    return deletes(told, until, "") | {"held": len(held)}


def histories(told: Told, until: float, _: str) -> Told:
    """Four loops that request the longest possible history of look-ups."""
    of_blocks = blocks_pb2_grpc.BlocksStub(channel(told))  # type: ignore[no-untyped-call]
    stub, done = lookups_pb2_grpc.LookupsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]
    prefix = blocks.PrefixRequest(keys=_KEYS, fingerprint=bytes(16))
    call_all([(of_blocks.Prefix, prefix)] * 500, told, done)

    def work(_: str) -> None:
        while time.monotonic() < until:
            call_all([(stub.ListLookups, lookups.ListLookupsRequest())], told, done)

    all_at_once(work, _LOOPS)
    return done


def erases(told: Told, until: float, _: str) -> Told:
    """Four loops that erase a user without data, which scans all blocks of the tenant."""
    _put_all(told)
    stub, done = erasing_pb2_grpc.ErasingStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(_: str) -> None:
        while time.monotonic() < until:
            call_all([(stub.EraseUser, erasing.EraseUserRequest(user="nobody"))], told, done)

    all_at_once(work, _LOOPS)
    return done


def block_prefetches(told: Told, until: float, _: str) -> Told:
    """Four loops that prefetch a thousand blocks that are in memory already."""
    _put_all(told)
    stub, done = steps_pb2_grpc.StepsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(_: str) -> None:
        while time.monotonic() < until:
            call_all([(stub.PrefetchBlocks, steps.PrefetchBlocksRequest(keys=_KEYS))], told, done)

    all_at_once(work, _LOOPS)
    return done


def questions(told: Told, until: float, _: str) -> Told:
    """Four streams that ask server reflection for messages, without a pause."""
    done = {"OK": 0}
    question = reflection_pb2.ServerReflectionRequest(file_containing_symbol="kvstore.v1.KvStore")

    def ask() -> Iterator[Any]:
        while time.monotonic() < until:
            yield question

    def work(name: str) -> None:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel(told, int(name)))
        with suppress(grpc.RpcError):
            for _answer in stub.ServerReflectionInfo(ask(), metadata=bearer(told), timeout=60):
                done["OK"] += 1

    all_at_once(work, _LOOPS)
    return done


def pages(told: Told, until: float, source: str) -> Told:
    """Twelve loops that request a page of the node."""
    done: dict[str, int] = {}
    head = f"GET {told['page']} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {told['token']}\r\n\r\n"

    def work(_: str) -> None:
        while time.monotonic() < until:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", told["port"]), 5, (source, 0)) as link,
            ):
                link.sendall(head.encode())
                said = link.recv(1 << 16)
                while link.recv(1 << 16):
                    pass
                status = said[9:12].decode()
                done[status] = done.get(status, 0) + 1

    all_at_once(work, [str(number) for number in range(12)])
    return done


LOOP_ATTACKS: dict[str, Callable[[Told, float, str], Told]] = {
    one.__name__: one
    for one in (
        protects,
        ends,
        prefetches,
        pins,
        tiny_puts,
        deletes,
        cancels,
        watches,
        histories,
        erases,
        block_prefetches,
        questions,
        pages,
    )
}
