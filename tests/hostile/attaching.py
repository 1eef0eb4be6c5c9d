"""Attacks with connections over the fabric, each of them allowed, as programs of `tests.hostile.attacks`."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.client import Block, Client
from kvstore.errors import KvError
from kvstore.limits import ACK_WORDS, BATCH_BLOCKS_MAX, LEASE_TIMEOUT_MS_MAX, SLOTS_PER_CLIENT_MAX
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from nic_offload.memory import allocate
from nic_offload.sockaddr import SocketAddress, ip_of
from tests.hostile.calling import Told, all_at_once, bearer, call_all, channel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["ATTACHING_ATTACKS"]

_LOOPS = ["1", "2", "3", "4"]
_LENGTH = 4096


def _attach(told: Told, number: int, until: float) -> Any:
    """Open a connection with a client that does nothing, until this is cancelled."""
    stub = kvstore_pb2_grpc.KvStoreStub(channel(told, number))  # type: ignore[no-untyped-call]
    wanted = pb.AttachRequest(
        block_bytes_max=_LENGTH,
        slots=SLOTS_PER_CLIENT_MAX,
        provider="net",
        fabric_address=SocketAddress(ip_of("127.0.0.1"), 10_000 + number).encoded,
        ack_words=ACK_WORDS,
        puts_by_grants=True,
    )

    def requests() -> Iterator[Any]:
        yield wanted
        time.sleep(max(0.0, until + 5 - time.monotonic()))

    return stub.Attach(requests(), metadata=bearer(told))


@contextmanager
def _attached(told: Told, number: int, until: float) -> Iterator[tuple[Any, int]]:
    call = _attach(told, number, until)
    try:
        yield kvstore_pb2_grpc.KvStoreStub(channel(told, number)), next(call).connection  # type: ignore[no-untyped-call]
    finally:
        call.cancel()


def churn(told: Told, until: float, _: str) -> Told:
    """Four loops of clients that attach and leave at once; two more of clients that put a block before they leave."""
    did = {"attached": 0, "put": 0, "refused": 0}

    def work(name: str) -> None:
        while time.monotonic() < until:
            try:
                if name.startswith("put"):
                    with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
                        region = client.register(allocate(_LENGTH))
                        (ended,) = client.put([Block(os.urandom(32), region, 0, _LENGTH)], timeout_s=5)
                        did["put" if ended.error is None else "refused"] += 1
                else:
                    call = _attach(told, int(name), until)
                    next(call)
                    did["attached"] += 1
                    call.cancel()
            except (KvError, grpc.RpcError):
                did["refused"] += 1
                time.sleep(0.01)

    all_at_once(work, [*_LOOPS, "put 1", "put 2"])
    return did


def _reserve(connection: int, blocks: int = BATCH_BLOCKS_MAX) -> pb.ReserveRequest:
    names = [pb.BlockName(key=os.urandom(32), fingerprint=bytes(16), length=_LENGTH) for _ in range(blocks)]
    return pb.ReserveRequest(
        connection=connection,
        blocks=[pb.ReserveBlock(name=one, ack_word=at) for at, one in enumerate(names)],
        durability=pb.DURABILITY_WRITTEN,
        lease_ms=LEASE_TIMEOUT_MS_MAX,
    )


def hoard(told: Told, until: float, _: str) -> Told:
    """Connections that each reserve all their slots for the longest time, never put, and request more."""
    did: dict[str, int] = {}
    held: list[Any] = []
    lock = threading.Lock()

    def work(name: str) -> None:
        number = int(name)
        while time.monotonic() < until:
            call = _attach(told, number, until)
            number += len(_LOOPS)
            try:
                connection = next(call).connection
            except grpc.RpcError as error:
                with lock:
                    did[error.code().name] = did.get(error.code().name, 0) + 1
                time.sleep(0.01)
                continue
            held.append(call)
            stub = kvstore_pb2_grpc.KvStoreStub(channel(told, number))  # type: ignore[no-untyped-call]
            ask = _reserve(connection)
            call_all([(stub.Reserve, ask)] * 4, told, did)

    all_at_once(work, _LOOPS)
    return {"held": len(held), **did}


def reserves(told: Told, until: float, _: str) -> Told:
    """Four loops that reserve a thousand slots and release them."""
    done: dict[str, int] = {}

    def work(name: str) -> None:
        with _attached(told, int(name), until) as (stub, connection):
            while time.monotonic() < until:
                with suppress(grpc.RpcError):
                    reserved = stub.Reserve(_reserve(connection), metadata=bearer(told), timeout=20)
                    leases = [
                        pb.AbortLease(slot=one.slot, generation=one.generation) for one in reserved.leases
                    ]
                    abort = pb.AbortRequest(connection=connection, leases=leases)
                    call_all([(stub.Abort, abort)], told, done)

    all_at_once(work, _LOOPS)
    return done


def armed(told: Told, until: float, _: str) -> Told:
    """Four clients that arm a thousand puts, store no flag, and cancel them."""
    done = {"OK": 0, "refused": 0}

    def work(_: str) -> None:
        with Client(
            f"127.0.0.1:{told['port']}",
            token=told["token"],
            slots=SLOTS_PER_CLIENT_MAX,
            block_bytes_max=_LENGTH,
        ) as client:
            region = client.register(allocate(_LENGTH))
            while time.monotonic() < until:
                try:
                    blocks = [Block(os.urandom(32), region, 0, _LENGTH) for _ in range(BATCH_BLOCKS_MAX)]
                    client.reserve(blocks).give_back()
                    done["OK"] += 1
                except KvError:
                    done["refused"] += 1

    all_at_once(work, _LOOPS)
    return done


def fetch_cancels(told: Told, until: float, _: str) -> Told:
    """Four loops that fetch a thousand blocks over gRPC into memory that doesn't exist, and cancel them."""
    done: dict[str, int] = {}

    def work(name: str) -> None:
        generation = 1
        with _attached(told, int(name), until) as (stub, connection):
            while time.monotonic() < until:
                numbers = range(BATCH_BLOCKS_MAX)
                fetch = pb.FetchRequest(
                    connection=connection,
                    blocks=[
                        pb.FetchBlock(
                            name=pb.BlockName(key=os.urandom(32), fingerprint=bytes(16), length=_LENGTH),
                            ack_word=at,
                            ack_generation=generation + at,
                        )
                        for at in numbers
                    ],
                )
                cancel = pb.CancelFetchRequest(
                    connection=connection,
                    blocks=[pb.CancelledBlock(ack_word=at, ack_generation=generation + at) for at in numbers],
                    called=True,
                )
                generation += BATCH_BLOCKS_MAX
                call_all([(stub.Fetch, fetch), (stub.CancelFetch, cancel)], told, done)

    all_at_once(work, _LOOPS)
    return done


ATTACHING_ATTACKS: dict[str, Callable[[Told, float, str], Told]] = {
    one.__name__: one for one in (churn, hoard, reserves, armed, fetch_cancels)
}
