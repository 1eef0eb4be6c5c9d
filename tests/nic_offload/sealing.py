"""Tags as described in `docs/wire.md`, computed without our code; and a forger with valid memory keys but no seal."""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, NamedTuple, Self

from nic_offload.trigger import TriggeredNotify, TriggeredPut, arm
from tests.nic_offload.rig import Side, Way

if TYPE_CHECKING:
    from tests.nic_offload.rig import Pair

WHOLE = (1 << 64) - 1
TO_NODE, TO_CLIENT = bytes(range(16)), bytes(range(50, 66))


class Spot(NamedTuple):
    """A place in memory, as seen by peers."""

    address: int
    key: int


def siphash(key: bytes, data: bytes) -> int:
    """SipHash-2-4, as its authors wrote it down."""
    first, second = struct.unpack("<QQ", key)
    v: list[int] = [
        first ^ 0x736F6D6570736575,
        second ^ 0x646F72616E646F6D,
        first ^ 0x6C7967656E657261,
        second ^ 0x7465646279746573,
    ]

    def rotated(word: int, bits: int) -> int:
        return (word << bits | word >> (64 - bits)) & WHOLE

    def mix(rounds: int) -> None:
        for _ in range(rounds):
            v[0] = (v[0] + v[1]) & WHOLE
            v[2] = (v[2] + v[3]) & WHOLE
            v[1] = rotated(v[1], 13) ^ v[0]
            v[3] = rotated(v[3], 16) ^ v[2]
            v[0] = rotated(v[0], 32)
            v[2] = (v[2] + v[1]) & WHOLE
            v[0] = (v[0] + v[3]) & WHOLE
            v[1] = rotated(v[1], 17) ^ v[2]
            v[3] = rotated(v[3], 21) ^ v[0]
            v[2] = rotated(v[2], 32)

    whole = len(data) // 8 * 8
    last = int.from_bytes(data[whole:].ljust(7, b"\0"), "little") | (len(data) & 0xFF) << 56
    for (word,) in itertools.chain(struct.iter_unpack("<Q", data[:whole]), [(last,)]):
        v[3] ^= word
        mix(2)
        v[0] ^= word
    v[2] ^= 0xFF
    mix(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def word_of(key: bytes, spot: Spot, said: int) -> int:
    """The sealed word for a value: a flag's generation, or an acknowledgement with its code."""
    return siphash(key, struct.pack("<4Q", 1, *spot, said)) & ~0xFF | said & 0xFF


def tag_of(key: bytes, spot: Spot, generation: int, data: bytes) -> bytes:
    """The tag of a head with its metadata, a call, or an answer."""
    return siphash(key, struct.pack("<4Q", 2, *spot, generation) + data).to_bytes(8, "little")


def seal(pair: Pair) -> None:
    """The near side is the client, the far side its node."""
    pair.near.endpoint.seal(TO_NODE, TO_CLIENT, pair.near.region)
    pair.far.endpoint.seal(TO_CLIENT, TO_NODE)


class Forger:
    """Writes anything anywhere, from its own endpoint and fabric."""

    def __init__(self, provider: str, side: Side) -> None:
        self._own = Side(provider)
        self._way = Way.between(self._own, side)
        self._tags = itertools.count(1)

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes into the side's memory, and wait until they are there."""
        self._own.fill(0, data)
        self._end(self._way.put(next(self._tags), len(data), target=offset))

    def word(self, target: int, value: int) -> None:
        way = self._way
        self._end(
            TriggeredNotify(next(self._tags), way.endpoint, way.peer, target, way.key, value),
        )

    def _end(self, operation: TriggeredPut | TriggeredNotify) -> None:
        arm(self._own.fabric, [operation])
        self._own.final(operation.tag)

    def close(self) -> None:
        self._own.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
