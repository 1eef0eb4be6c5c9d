"""Attacks with sessions of the maximum length, as programs of `tests.hostile.attacks`."""

from __future__ import annotations

import os
import random
import threading
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.client import Client
from kvstore.limits import SESSION_BLOCKS_MAX, SESSION_TURNS_MAX
from kvstore.wire import sessions_pb2 as sessions
from kvstore.wire import sessions_pb2_grpc
from tests.hostile.calling import Told, all_at_once, bearer, call_all, channel

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LARGE", "SESSION_ATTACKS", "make_large_sessions"]

LARGE = sessions.SessionName(user="u", session="s")


def make_large_sessions(told: Told) -> None:
    """Make one session of the maximum length, and 64 with its first thousand turns."""
    with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
        keys = [os.urandom(32) for _ in range(128)]
        client.put_many_inline((key, key) for key in keys)
    stub, name = sessions_pb2_grpc.SessionsStub(channel(told)), LARGE  # type: ignore[no-untyped-call]
    for _ in range(SESSION_TURNS_MAX - 1):
        stub.AppendSession(sessions.AppendSessionRequest(name=name, keys=keys[:1]), metadata=bearer(told))
    many = [random.choice(keys) for _ in range(SESSION_BLOCKS_MAX - SESSION_TURNS_MAX)]
    stub.AppendSession(sessions.AppendSessionRequest(name=name, keys=many), metadata=bearer(told))
    for number in range(64):
        fork = sessions.SessionName(user=name.user, session=str(number))
        wanted = sessions.ForkSessionRequest(source=name, name=fork, blocks=SESSION_TURNS_MAX)
        stub.ForkSession(wanted, metadata=bearer(told))


def lists(told: Told, until: float, _: str) -> Told:
    """Four loops that list sessions of a thousand turns and sixty thousand blocks."""
    stub = sessions_pb2_grpc.SessionsStub(channel(told))  # type: ignore[no-untyped-call]
    ask = sessions.ListSessionsRequest(user=LARGE.user)
    done: dict[str, int] = {}

    def work() -> None:
        while time.monotonic() < until:
            try:
                stub.ListSessions(ask, metadata=bearer(told), timeout=20)
                name = "OK"
            except grpc.RpcError as error:
                name = error.code().name
            done[name] = done.get(name, 0) + 1

    working = [threading.Thread(target=work) for _ in range(4)]
    for one in working:
        one.start()
    for one in working:
        one.join()
    return done


def forks(told: Told, until: float, _: str) -> Told:
    """Two loops that fork the longest possible session, truncate the fork and remove it."""
    stub, done = sessions_pb2_grpc.SessionsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]

    def work(session: str) -> None:
        name = sessions.SessionName(user=LARGE.user, session=session)
        calls: tuple[tuple[Any, Any], ...] = (
            (stub.ForkSession, sessions.ForkSessionRequest(source=LARGE, name=name)),
            (
                stub.TruncateSession,
                sessions.TruncateSessionRequest(name=name, blocks=SESSION_BLOCKS_MAX // 2),
            ),
            (stub.RemoveSession, sessions.RemoveSessionRequest(name=name)),
        )
        while time.monotonic() < until:
            call_all(calls, told, done)

    all_at_once(work, ["fork 1", "fork 2"])
    return done


def appends(told: Told, until: float, _: str) -> Told:
    """Two loops that append the maximum number of blocks in a single turn, and remove the session."""
    stub, done = sessions_pb2_grpc.SessionsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]
    whole = stub.GetSession(
        sessions.GetSessionRequest(name=LARGE, blocks=SESSION_BLOCKS_MAX), metadata=bearer(told)
    )
    keys = list(whole.keys)

    def work(session: str) -> None:
        name = sessions.SessionName(user=LARGE.user, session=session)
        remove = sessions.RemoveSessionRequest(name=name)
        for turn in count(1):
            if time.monotonic() >= until:
                return
            other = [*keys[turn:], *keys[:turn]]  # in other chunks than there are
            append = sessions.AppendSessionRequest(name=name, keys=other)
            call_all([(stub.AppendSession, append), (stub.RemoveSession, remove)], told, done)

    all_at_once(work, ["append 1", "append 2"])
    return done


def stored(told: Told, until: float, _: str) -> Told:
    """Four loops that request all keys of the longest possible session, as a resume does."""
    stub, done = sessions_pb2_grpc.SessionsStub(channel(told)), dict[str, int]()  # type: ignore[no-untyped-call]
    ask = sessions.GetSessionRequest(name=LARGE, blocks=SESSION_BLOCKS_MAX)

    def work(_: str) -> None:
        while time.monotonic() < until:
            try:
                stub.GetSession(ask, metadata=bearer(told), timeout=20)
                ended = "OK"
            except grpc.RpcError as error:
                ended = error.code().name
            done[ended] = done.get(ended, 0) + 1

    all_at_once(work, [""] * 4)
    return done


SESSION_ATTACKS: dict[str, Callable[[Told, float, str], Told]] = {
    one.__name__: one for one in (lists, forks, appends, stored)
}
