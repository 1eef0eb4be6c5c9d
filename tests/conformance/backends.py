"""The backends, and why one is not available.

libfabric is loaded once per process, so the stand-in for a Cassini and the software providers are never in one process.
Providers that this process's library lacks are skipped, and `test_cassini` runs the suite again in a process with the
stand-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nic_offload.fabric import WORK_MAX, EventKind
from nic_offload.flags import FlagWord, FlagWords
from tests.nic_offload.rig import PAGE, WAIT_S, Pair, Side, Way, after_ms, wait_until

if TYPE_CHECKING:
    from nic_offload.counter import Counter

REACHED_MAX = 1 << 47  # the counters of a NIC have 48 bits


class Backend(NamedTuple):
    """Which component fires operations, over which provider, and whether other processes may map the counters."""

    name: str
    provider: str
    deferred_work: bool
    own_counters: bool  # counters opened without a word: on cxi the NIC's, with doorbells

    @property
    def nic_counts(self) -> bool:
        """Whether the NIC moves counters, so that only a flush can withdraw its operations."""
        return self.provider == "cxi" and self.own_counters


BACKENDS = (
    Backend("net", "net", deferred_work=False, own_counters=False),
    Backend("tcp", "tcp", deferred_work=False, own_counters=False),
    Backend("rxm-own", "tcp;ofi_rxm", deferred_work=False, own_counters=True),
    Backend("memory", "memory", deferred_work=False, own_counters=False),
    Backend("shm", "shm", deferred_work=False, own_counters=False),
    Backend("sockets-own", "sockets", deferred_work=False, own_counters=True),
    Backend("sockets-deferred", "sockets", deferred_work=True, own_counters=False),
    Backend("sockets-deferred-own", "sockets", deferred_work=True, own_counters=True),
    Backend("cxi", "cxi", deferred_work=True, own_counters=False),
    Backend("cxi-own", "cxi", deferred_work=True, own_counters=True),
)


class Gate:
    """A counter that a test moves as a GPU would: by a store, with no call into the fabric."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        address, self._adds = counter.doorbell()
        self._bell = FlagWord(address)
        self.at = 0

    def raise_to(self, value: int) -> None:
        if not self._adds:
            self._bell.store(value)
        elif value > self.at:
            wait_until(lambda: self._bell.load() == 0, "the doorbell's last ring to be taken")
            self._bell.store(value - self.at)
        self.at = value


class Stage(Pair):
    """Two sides of a backend, and counters of its kind."""

    def __init__(self, backend: Backend, length: int = 1 << 20, work_max: int = WORK_MAX) -> None:
        super().__init__(
            backend.provider, length, work_max, deferred_work=backend.deferred_work, remote_read=True
        )
        self.backend = backend
        self.words = FlagWords.create(512)
        self._words_taken = 0

    def counter(self, side: Side | None = None) -> Counter:
        """A new counter of the backend's kind, which operations may move too."""
        fabric = (side or self.near).fabric
        if self.backend.own_counters:
            return fabric.open_counter()
        self._words_taken += 1
        return fabric.open_counter(self.words[self._words_taken - 1])

    def gate(self, side: Side | None = None) -> Gate:
        return Gate(self.counter(side))

    def settle(self, gate: Gate | None = None) -> None:
        """Wait until everything that the counters have fired has arrived."""
        if gate is not None:
            wait_until(lambda: gate.counter.value() >= gate.at, "the counter to have taken its stores")
        for way, side in ((self.there, self.far), (self.back, self.near), (self.there, self.far)):
            lands(side.word(PAGE // 8 - 1), way.fence())
        self.near.reap()

    def holds_no_work(self) -> None:
        wait_until(lambda: busy_with(self.near) == 0, "nothing under way")

    def holds_nothing(self) -> None:
        """All armed operations have ended, and the statistics show it."""
        self.holds_no_work()
        now = self.near.fabric.statistics()
        assert now.armed == now.done + now.failed + now.cancelled
        assert now.expired <= now.failed

    def close(self) -> None:
        super().close()
        self.words.close()


def busy_with(side: Side) -> int:
    now = side.fabric.statistics()
    return now.waiting + now.held + now.in_flight


def lands(word: FlagWord, value: int, seconds: float = WAIT_S) -> None:
    """Wait for a word of memory without any call into a fabric."""
    wait_until(lambda: word.load() == value, f"{value} in a word that holds {word.load()}", seconds)


def end_or_late(side: Side, tag: int) -> EventKind:
    """The operation's end, or LATE at its deadline."""
    ends = {EventKind.DONE, EventKind.FAILED, EventKind.LATE}
    side.wait(lambda: bool(ends & set(side.kinds(tag))), f"an end of {tag}, or its being late")
    return next(kind for kind in side.kinds(tag) if kind in ends)


def refusal_deadline_ns(side: Side) -> int:
    """A deadline for an operation that the peer's side of the wire refuses.

    shm never says that it was refused: it is late then. The others say so, and need time until it has gone out: on a
    busy machine to connect alone takes a second.
    """
    return after_ms(1000 if side.fabric.provider == "shm" else WAIT_S * 250)


def through(near: Side, far: Side) -> Way:
    """Another path from `near` to `far`, through its own endpoint."""
    return Way.between(Side.more(near), far)


def each_once(side: Side, tags: range, kind: EventKind = EventKind.DONE) -> None:
    """Every one of the tags has exactly one event, of this kind."""
    seen = [event for event in side.events if event.tag in tags]
    assert len(seen) == len(tags)
    assert {event.tag for event in seen} == set(tags)
    assert {event.kind for event in seen} == {kind}
