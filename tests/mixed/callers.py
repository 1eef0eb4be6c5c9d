"""Threads that use the same few keys of one node, each through a client of another kind, and note every call.

A caller is a thread with a client, and with memory for one block of each key to put from and one to get into. It draws
one operation after the other (`tests.mixed.operations`) from its own seed, until its time is over.

What always holds: each call is noted before it begins, and its end once it has returned. A put whose end is unknown
may still be sent, so its client is closed before its memory is used again.
What it doesn't do: repeat a history exactly. A seed gives the same operations, and the machine their order.
"""

from __future__ import annotations

import functools
import random
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from kvstore.client import Block, Client
from kvstore.client import link as links
from kvstore.client.shared import MappedMemory, map_shared
from kvstore.errors import (
    BeingErased,
    Expired,
    KeyTaken,
    KvError,
    LeaseExpired,
    NoSpace,
    Overloaded,
    QuotaExceeded,
    Refused,
)
from kvstore.miss import Miss
from kvstore.names import UNSAID, block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.mixed.key_history import OTHER_BYTES, End, Event, History, Kind, Way

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pytest

    from kvstore.client import PutResult
    from kvstore.durability import Durability
    from tests.mixed.operations import Operation

__all__ = ["Caller", "Key", "Shared", "contents", "crowd_of", "end_of_error", "map_for_some"]

CALL_TIMEOUT_S: Final = 20.0  # no call of a node that is well takes so long, on whatever machine
OPERATION_S_MAX: Final = 60.0  # some make several calls, and a node may be away
ROOM_BYTES: Final = 1 << 19  # of a block in a caller's memory
SLOTS: Final = 16
KINDS: Final = ("shared memory", "network", "shared memory", "gRPC", "network", "shared memory")
REFUSALS: Final = (BeingErased, Expired, NoSpace, QuotaExceeded)
EXPECTED: Final = (LeaseExpired, NoSpace, Overloaded, QuotaExceeded, Refused)  # from a node that is well
_VALUE_BYTES: Final = 8


@dataclass(frozen=True)
class Key:
    """A key, and what all blocks that are put under it have in common."""

    name: bytes
    domain: bytes
    length: int


def crowd_of(number: int) -> list[bytes]:
    """The keys that only the caller of this number uses."""
    return [block_key(b"crowd", bytes([number, at])) for at in range(SLOTS - 1)]


@functools.lru_cache(maxsize=256)
def contents(value: int, length: int) -> bytes:
    """The bytes of a block: its value, and what follows from it; no two values have a block in common."""
    head = value.to_bytes(_VALUE_BYTES, "big")
    piece = head + blake2b(head, digest_size=64).digest()
    return (piece * (length // len(piece) + 1))[:length]


def end_of_error(error: KvError) -> End:
    """How a put ended that failed with this error."""
    if isinstance(error, KeyTaken):
        return End.TAKEN
    return End.REFUSED if isinstance(error, REFUSALS) else End.UNKNOWN


@dataclass
class Shared:
    """What the callers of one node have in common."""

    keys: Sequence[Key]
    history: History
    client: Mapping[str, Any]  # arguments of clients
    operations: Sequence[Operation]  # each as often as it is to be drawn, relative to the others
    seed: int
    filler_domain: bytes = UNSAID
    users: Sequence[str] = ("ada", "bob")
    target: str = ""
    until_s: float = 0.0
    is_away: threading.Event = field(default_factory=threading.Event)  # the node is, or was in this phase
    troubles: list[str] = field(default_factory=list)  # beside faults of the history
    _values: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _latest: dict[int, list[int]] = field(default_factory=dict)

    def value(self, dice: random.Random, key: int) -> int:
        """The number of bytes to put under a key: one of those put lately, now and then."""
        with self._lock:
            latest = self._latest.setdefault(key, [])
            if latest and dice.random() < 0.1:
                return dice.choice(latest[-6:])
            self._values += 1
            latest.append(self._values)
            return self._values

    def value_in(self, key: int, data: bytes) -> int:
        """Which value these bytes are."""
        value = int.from_bytes(data[:_VALUE_BYTES], "big")
        is_whole = 0 < value <= self._values and data == contents(value, self.keys[key].length)
        return value if is_whole else OTHER_BYTES


def map_for_some(patch: pytest.MonkeyPatch) -> None:
    """Let callers of the kind "network" map none of their node's memory, as if it were on another machine."""

    def mapped(*told: Any) -> MappedMemory:
        name = threading.current_thread().name
        return MappedMemory() if name.startswith("network") else map_shared(*told)

    patch.setattr(links, "map_shared", mapped)


class Caller(threading.Thread):
    """One client's thread."""

    def __init__(self, shared: Shared, number: int, phase: int) -> None:
        self.kind = KINDS[number % len(KINDS)]
        super().__init__(name=f"{self.kind} {number}", daemon=True)
        self.shared, self.number = shared, number
        self.dice = random.Random(f"{shared.seed} {phase} {number}")
        self.doing, self.since_s = "nothing", 0.0
        self._begun: list[Event] = []  # puts and removals of the operation under way
        self.memory = allocate(2 * len(shared.keys) * ROOM_BYTES)
        self.flags = FlagWords.create(1)
        self._open()

    def _open(self) -> None:
        more: dict[str, Any] = {"transport": "grpc"} if self.kind == "gRPC" else {}
        timeout_ms = int(CALL_TIMEOUT_S * 1000)
        self.client = Client(
            self.shared.target,
            slots=SLOTS,
            block_bytes_max=ROOM_BYTES,
            get_timeout_ms=timeout_ms,
            call_timeout_ms=timeout_ms,
            **self.shared.client,
            **more,
        )
        self.region = self.client.register(self.memory)

    def renew(self) -> None:
        """Continue with a new client; what the old one had not sent never will be."""
        with suppress(KvError):
            self.client.close()
        self._open()

    def run(self) -> None:
        """Call until the time is over."""
        while time.monotonic() < self.shared.until_s:
            operation = self.dice.choice(self.shared.operations)
            self._begun.clear()
            self.doing, self.since_s = operation.__name__, time.monotonic()
            try:
                operation(self)
            except EXPECTED:
                pass
            except KvError as error:
                self._note_unexpected(error)
            except Exception:  # noqa: BLE001 - whatever it is, it is reported with the history's seed
                self.trouble(traceback.format_exc())
            for event in self._begun:
                if event.end is End.UNKNOWN:  # a client that could still send it has been closed
                    event.ended_s = time.monotonic()
            if (took_s := time.monotonic() - self.since_s) > OPERATION_S_MAX:
                self.trouble(f"took {took_s:.1f} s")
            self.doing = "nothing"

    def close(self) -> None:
        """End the client."""
        with suppress(KvError):
            self.client.close()
        self.flags.close()

    def trouble(self, words: str) -> None:
        """Report what no history shows."""
        self.shared.troubles.append(f"{self.name}, {self.doing}: {words}")

    # --- what operations draw

    def key(self) -> int:
        return self.dice.randrange(len(self.shared.keys))

    def some_keys(self, most: int = 4) -> list[int]:
        every = range(len(self.shared.keys))
        return self.dice.sample(every, self.dice.randint(1, min(most, len(every))))

    def crowd(self) -> list[bytes]:
        """Keys of this caller's own, one less than it has slots."""
        return crowd_of(self.number)

    def names(self, keys: Sequence[int]) -> list[bytes]:
        return [self.shared.keys[key].name for key in keys]

    def expires_unix_ms(self) -> int:
        """A time to live that ends soon, now and then; 0: none."""
        is_short = self.dice.random() < 0.08
        return time.time_ns() // 1_000_000 + self.dice.choice((20, 60, 200)) if is_short else 0

    # --- puts

    def begin_put(self, key: int, way: Way, durability: Durability, expires_unix_ms: int) -> Event:
        """Draw bytes, and note that they will be put."""
        put = Event(Kind.PUT, key, self.shared.value(self.dice, key), time.monotonic(), way=way)
        put.durability, put.call = durability, self.name
        if expires_unix_ms:
            put.expires_s = put.began_s + expires_unix_ms / 1000 - time.time()
        self._begun.append(put)
        return self.shared.history.add(put)

    def data(self, put: Event) -> bytes:
        assert put.value is not None
        return contents(put.value, self.shared.keys[put.key].length)

    def source(self, put: Event, *, is_second: bool = False) -> Block:
        """The put's bytes in registered memory; of two blocks of a key in one call, the second elsewhere."""
        key = self.shared.keys[put.key]
        offset = (put.key + is_second * len(self.shared.keys)) * ROOM_BYTES
        self.memory[offset : offset + key.length] = self.data(put)
        return Block(key.name, self.region, offset, key.length, domain=key.domain)

    def end_puts(self, puts: Sequence[Event], results: Sequence[PutResult]) -> None:
        """Note results."""
        ended_s = time.monotonic()
        for put, result in zip(puts, results, strict=True):
            if result.error is None:
                end = End.ALREADY if result.already_stored else End.DONE
            else:
                end = end_of_error(result.error)
                if end is End.UNKNOWN and not isinstance(result.error, EXPECTED):
                    self._note_unexpected(result.error)
            put.ended_s, put.end = ended_s, end

    def _note_unexpected(self, error: KvError) -> None:
        # Short deadlines that a busy machine misses open the client's breaker: then later calls aren't tried.
        if not self.shared.is_away.is_set() and getattr(error, "was_tried", True):
            self.trouble(f"{type(error).__name__}: {error}")

    def end_all(self, puts: Sequence[Event], end: End) -> None:
        """Note one end of several puts."""
        ended_s = time.monotonic()
        for put in puts:
            put.ended_s, put.end = ended_s, end

    # --- gets

    def targets(self, keys: Sequence[int], fill: bytes = b"\0") -> list[Block]:
        """Where blocks go in registered memory, which has other bytes until then."""
        blocks = []
        for at in keys:
            key, offset = self.shared.keys[at], (len(self.shared.keys) + at) * ROOM_BYTES
            self.memory[offset : offset + key.length] = fill * key.length
            blocks.append(Block(key.name, self.region, offset, key.length))
        return blocks

    def bytes_at(self, blocks: Sequence[Block]) -> list[bytes]:
        return [self.memory[one.offset : one.offset + one.length] for one in blocks]

    def got(self, call: str, began_s: float, keys: Sequence[int], outcomes: Sequence[bytes | Miss]) -> None:
        """Note the outcomes of a get that has just ended."""
        ended_s = time.monotonic()
        for key, outcome in zip(keys, outcomes, strict=True):
            is_miss = isinstance(outcome, Miss)
            event = Event(Kind.MISS if is_miss else Kind.HIT, key, None, began_s, ended_s, End.DONE)
            if isinstance(outcome, Miss):
                event.reason = outcome.reason
            else:
                event.value = self.shared.value_in(key, outcome)
            event.call = f"{call}, {self.name}"
            self.shared.history.add(event)

    # --- removals

    def begin_removals(self, keys: Sequence[int], call: str, sure: Sequence[int] = ()) -> list[Event]:
        """Note that blocks of these keys may be removed by a call, and those of the sure ones will be."""
        began_s = time.monotonic()
        removals = [Event(Kind.REMOVAL, key, None, began_s, is_sure=key in sure, call=call) for key in keys]
        self._begun += removals
        return [self.shared.history.add(removal) for removal in removals]

    def every_key(self) -> Iterator[tuple[int, Key]]:
        return enumerate(self.shared.keys)
