"""Attacks through memory that a client may write: its slots, over the fabric, and mapped on the node's own machine."""

from __future__ import annotations

import array
import os
import random
import socket
import threading
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from kvstore.client import Block, Client
from kvstore.client import link as links
from kvstore.errors import FabricError, KvError
from nic_offload.fabric import Fabric
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredPut, arm

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

    from kvstore.client.shared import MappedMemory
    from kvstore.wire import kvstore_pb2 as pb

__all__ = ["MEMORY_ATTACKS", "map_and_keep"]

Told = dict[str, Any]
_LENGTH = 64 << 10
_PAUSE_S = (
    0.00002  # in which the node's thread does not fall asleep, and the attack leaves the core to others
)
_TIMES = 32  # that a payload is written over


def rewrite(told: Told, until: float, _: str) -> Told:
    """Payloads that are overwritten over the fabric after their flag; then they are got."""
    did = {"put": 0, "refused": 0, "hit": 0, "miss": 0, "over": 0}
    tags = count(1)
    with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
        source = allocate(_LENGTH)
        region = client.register(source)
        fabric = Fabric(client.fabric.provider, address="127.0.0.1")
        endpoint, memory = fabric.open_endpoint(), allocate(_LENGTH)
        other = fabric.register(memory, remote_write=False)
        memory[:] = b"x" * _LENGTH
        peers: dict[bytes, Any] = {}
        while time.monotonic() < until:
            source[:] = os.urandom(64) * (_LENGTH // 64)
            key = os.urandom(32)
            try:
                puts = client.reserve([Block(key, region, 0, _LENGTH)])
                lease, link = puts._leases[0], puts._link
                if link.node_address not in peers:
                    peers[link.node_address] = fabric.add_peer(link.node_address)
                over = [
                    TriggeredPut(
                        next(tags),
                        endpoint,
                        peers[link.node_address],
                        other,
                        other.address,
                        _LENGTH,
                        lease.payload,
                        link.landing_key,
                    )
                    for _ in range(_TIMES)
                ]
                armed = puts.arm(None)
                for one in over:
                    with suppress(FabricError):
                        arm(fabric, [one])
                        did["over"] += 1
                (ended,) = armed.wait(10)
                did["put" if ended.error is None else "refused"] += 1
                found = client.get_inline(key, _LENGTH)
                did["hit" if isinstance(found, bytes) else "miss"] += 1
                while fabric.reap():
                    pass
            except KvError:
                did["refused"] += 1
    return did


def fetches(told: Told, until: float, _: str) -> Told:
    """Calls over the fabric on many connections at a time, each for as many missing blocks as allowed."""
    done = {"calls": 0, "errors": 0}

    def work() -> None:
        with Client(
            f"127.0.0.1:{told['port']}", token=told["token"], slots=16, block_bytes_max=1 << 20
        ) as client:
            region = client.register(allocate(told["blocks"] * 4096))
            asked = [Block(os.urandom(32), region, at * 4096, 4096) for at in range(told["blocks"])]
            while time.monotonic() < until:
                try:
                    client.get(asked, timeout_s=10)
                    done["calls"] += 1
                except KvError:
                    done["errors"] += 1

    working = [threading.Thread(target=work) for _one in range(told["connections"])]
    for one in working:
        one.start()
    for one in working:
        one.join()
    return done


def map_and_keep(kept: list[tuple[mmap.mmap, int]]) -> None:
    """Keep a mapping, and a doorbell, of all slots that clients of this process map from now on."""
    of_link = vars(links)["map_shared"]

    def keeping(told: pb.SharedMemory, puts: pb.PutArea) -> MappedMemory:
        mapped: MappedMemory = of_link(told, puts)
        if mapped.slots is not None:
            kept.append((mapped.slots.memory, os.dup(mapped.slots.node_doorbell)))
            mapped.slots = Unclosed(mapped.slots)  # type: ignore[assignment]
        return mapped

    vars(links)["map_shared"] = keeping


class Unclosed:
    """Slots whose mapping stays after their client has closed them."""

    def __init__(self, slots: Any) -> None:
        self._slots = slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def close(self) -> None:
        os.close(self._slots.node_doorbell)
        os.close(self._slots.own_doorbell)


def scribble(told: Told, until: float, _: str) -> Told:
    """Heads, payloads, flags, words and rows of mapped slots, overwritten at any moment, also after the detach."""
    did = {"put": 0, "refused": 0, "attached": 0, "written": 0, "rung": 0}
    kept: list[tuple[mmap.mmap, int]] = []
    map_and_keep(kept)
    dice = random.Random(1)

    def write() -> None:
        while time.monotonic() < until:
            if not kept:
                time.sleep(0.01)
            for slots, doorbell in kept[-4:]:
                for _ in range(100):
                    at = dice.randrange(len(slots) - 64)
                    if dice.random() < 0.5:
                        at %= 4096 - 64  # flags
                    slots[at : at + 64] = dice.randbytes(64)
                did["written"] += 100
                with suppress(OSError):
                    os.eventfd_write(doorbell, 1)
                    did["rung"] += 1
            time.sleep(_PAUSE_S)

    writing = threading.Thread(target=write)
    writing.start()
    while time.monotonic() < until:
        with (
            suppress(KvError),
            Client(
                f"127.0.0.1:{told['port']}", token=told["token"], slots=16, block_bytes_max=1 << 20
            ) as client,
        ):
            did["attached"] += 1
            source = allocate(_LENGTH)
            region = client.register(source)
            for _put in range(4):
                source[:64] = os.urandom(64)
                (ended,) = client.put([Block(os.urandom(32), region, 0, _LENGTH)], timeout_s=0.5)
                did["put" if ended.error is None else "refused"] += 1
    writing.join()
    return did


def ring(told: Told, until: float, _: str) -> Told:
    """A doorbell that is rung without end, and one that is full and never read."""
    kept: list[tuple[mmap.mmap, int]] = []
    map_and_keep(kept)
    with Client(f"127.0.0.1:{told['port']}", token=told["token"]) as client:
        region = client.register(allocate(_LENGTH))
        client.put([Block(os.urandom(32), region, 0, _LENGTH)])
        rung = 0
        while time.monotonic() < until:
            for _slots, doorbell in kept:
                with suppress(OSError):
                    os.eventfd_write(doorbell, 1)
                    rung += 1
            time.sleep(_PAUSE_S)
    return {"rung": rung, "mapped": len(kept)}


def passes(told: Told, until: float, _: str) -> Told:
    """Callers of the socket for passes: silent ones, with invalid passes, and with unrequested descriptors."""
    did = {"called": 0, "given": 0}
    given = os.open("/dev/null", os.O_RDONLY)
    held: list[socket.socket] = []
    while time.monotonic() < until:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            one.connect(f"\0{told['socket']}")
            did["called"] += 1
            if did["called"] % 3:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [given] * 16))
                one.sendmsg([os.urandom(16)], [rights])
                did["given"] += 16
            held.append(one)
        except OSError:
            one.close()
            time.sleep(0.005)
        for old in held[:-128]:
            old.close()
        del held[:-128]
    return did


MEMORY_ATTACKS: dict[str, Callable[[Told, float, str], Told]] = {
    one.__name__: one for one in (rewrite, fetches, scribble, ring, passes)
}
