"""Two sides of a fabric for tests, and ways to wait that end.

What always holds: nothing here sleeps to let something happen. Waits are on the fabric's eventfd or on a word
of memory, and every wait has a deadline after which the test fails.
"""

from __future__ import annotations

import copy
import math
import os
import select
import time
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, Self

from nic_offload.errors import FabricError
from nic_offload.fabric import MEMORY, WORK_MAX, Event, EventKind, Fabric
from nic_offload.flags import FlagWord, FlagWords
from nic_offload.library import load
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredGet, TriggeredNotify, TriggeredPut, arm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nic_offload.counter import Counter
    from nic_offload.fabric import Endpoint, Region
    from nic_offload.trigger import Operation

PROVIDERS = ("net", "tcp;ofi_rxm", "shm", "sockets")
WAIT_S = 20.0
_EAGER_S, _BETWEEN_LOOKS_S_MAX = 0.002, 0.005
_TRIES_MAX = 200
PAGE = 4096
FENCE_TAG = 1 << 62
FINAL = {EventKind.DONE, EventKind.FAILED, EventKind.LANDED, EventKind.WATCH_FAILED}


@cache
def offered() -> set[str]:
    """The providers with remote writes that this machine's libfabric has."""
    return {provider.name for provider in load().providers() if provider.rma}


def needs_provider(provider: str) -> None:
    """Skip a test if this libfabric doesn't offer the provider."""
    if provider != MEMORY and provider not in offered():
        version = load().version
        skip(f"libfabric {version} offers no {provider}: name one that does in TRIGGERKV_LIBFABRIC")


def needs_ends_of_their_own(provider: str) -> None:
    """Skip a test that closes one of two ends, if both share their memory."""
    if provider == "shm":
        skip(
            "shm: ends in one process have one memory, so none may go first (two processes: test_processes.py)"
        )


def skip(why: str) -> NoReturn:
    """`pytest.skip`, without importing pytest before."""
    import pytest  # noqa: PLC0415 - other processes have no use for it, and would take twice as long to start

    pytest.skip(why)


def open_fabric(provider: str, work_max: int = WORK_MAX, *, deferred_work: bool | None = None) -> Fabric:
    """A fabric that is reachable from this machine only."""
    return Fabric(provider, address="127.0.0.1", work_max=work_max, deferred_work=deferred_work)


def after_ms(milliseconds: float) -> int:
    """A deadline for the C core."""
    return time.monotonic_ns() + int(milliseconds * 1e6)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    """Wait until the condition holds: check continuously at first, then less and less often.

    Checking takes time from the threads that make it hold, all the more if it is a call to them.
    """
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        if waited_s > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        if waited_s < _EAGER_S:
            os.sched_yield()
        else:
            time.sleep(min(_BETWEEN_LOOKS_S_MAX, waited_s / 20))


def happens_more_often(happens: Callable[[], bool], share: float) -> bool:
    """Whether something happens clearly more often than in this share of tries, in spite of a busy machine."""
    count = 0
    for tries in range(1, _TRIES_MAX + 1):
        count += happens()
        if count > tries * share + math.sqrt(tries) + 1:
            return True
    return False


class Side:
    """A fabric with one endpoint and one registered piece of memory. Its last page is for words."""

    def __init__(
        self,
        provider: str,
        length: int = 1 << 20,
        work_max: int = WORK_MAX,
        *,
        deferred_work: bool | None = None,
        remote_read: bool = False,
    ) -> None:
        assert length % PAGE == 0
        self.fabric = open_fabric(provider, work_max, deferred_work=deferred_work)
        self.endpoint = self.fabric.open_endpoint()
        self.memory = allocate(length + PAGE)
        self._remote_read = remote_read
        self.region = self._register()
        self.length = length
        self.events: list[Event] = []
        self._counters: dict[int, Counter] = {}
        self._poll = select.poll()
        self._poll.register(self.fabric.fileno(), select.POLLIN)

    @classmethod
    def more(cls, side: Side, domain: int = 0, *, registers: bool = False) -> Side:
        """The same side through one more endpoint; with its memory registered again, if that is asked for or needed."""
        another = copy.copy(side)
        another.endpoint = side.fabric.open_endpoint(domain=domain)
        if registers or side.fabric.provider == "cxi":
            another.region = another._register()
        return another

    def _register(self) -> Region:
        """For the endpoint, as some NICs bind memory to one."""
        return self.fabric.register(self.memory, remote_read=self._remote_read, endpoint=self.endpoint)

    def counter(self, word: FlagWord) -> Counter:
        """The counter over a flag word, opened once."""
        if word.address not in self._counters:
            self._counters[word.address] = self.fabric.open_counter(word)
        return self._counters[word.address]

    def word_offset(self, index: int) -> int:
        """Where word `index` of the last page is; the last one is the fence's."""
        return self.length + 8 * index

    def word(self, index: int) -> FlagWord:
        return FlagWord(self.region.address + self.word_offset(index))

    def reap(self) -> None:
        """Take the pending events, without waiting."""
        while batch := self.fabric.reap():
            self.events += batch

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
        """Take events until a condition holds."""
        until = time.monotonic() + seconds
        self.reap()
        while not condition():
            left_ms = (until - time.monotonic()) * 1e3
            if left_ms <= 0:
                raise AssertionError(f"not within {seconds} s: {what}; events: {self.events[-10:]}")
            self._poll.poll(left_ms)
            self.reap()

    def of(self, tag: int) -> list[Event]:
        """All events of one put or watch so far."""
        return [event for event in self.events if event.tag == tag]

    def kinds(self, tag: int) -> list[EventKind]:
        return [EventKind(event.kind) for event in self.of(tag)]

    def finals(self) -> dict[int, Event]:
        return {event.tag: event for event in self.events if event.kind in FINAL}

    def final(self, tag: int, seconds: float = WAIT_S) -> Event:
        """Wait for the final event of one put or watch."""
        self.wait(lambda: tag in self.finals(), f"the end of {tag}", seconds)
        return self.finals()[tag]

    def all_final(self, tags: Iterable[int], seconds: float = WAIT_S) -> dict[int, Event]:
        """Wait for the final events of all of these."""
        wanted = set(tags)
        self.wait(lambda: wanted <= self.finals().keys(), "the end of all", seconds)
        return self.finals()

    def fill(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data

    def bytes_at(self, offset: int, length: int) -> bytes:
        return self.memory[offset : offset + length]

    def close(self) -> None:
        self.fabric.close()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Way:
    """The path from one side's endpoint into another side's memory."""

    def __init__(self, near: Side, address: bytes, base: int, key: int, length: int) -> None:
        self.near = near
        self.endpoint: Endpoint = near.endpoint
        self.peer = near.fabric.add_peer(address)
        self.base = base
        self.key = key
        self.length = length
        self._fences = FENCE_TAG

    @classmethod
    def between(cls, near: Side, far: Side) -> Self:
        return cls(near, far.endpoint.address(), far.region.base, far.region.key, far.length)

    def word_target(self, index: int) -> int:
        return self.base + self.length + 8 * index

    def put(
        self,
        tag: int,
        length: int,
        *,
        source: int = 0,
        target: int = 0,
        flag: tuple[int, int] | None = None,
        fires: tuple[FlagWord | Counter, int] | None = None,
        **more: Any,
    ) -> TriggeredPut:
        """A put of `length` bytes; `flag` is a word's index and value, `fires` a word or counter and a threshold."""
        fields: dict[str, Any] = {
            "region": self.near.region,
            "source": self.near.region.address + source,
            "length": length,
            "target": self.base + target,
            "target_key": self.key,
        }
        return TriggeredPut(**(self._fields(tag, flag, fires) | fields | more))

    def get(
        self,
        tag: int,
        length: int,
        *,
        source: int = 0,
        target: int = 0,
        flag: tuple[int, int] | None = None,
        fires: tuple[FlagWord | Counter, int] | None = None,
        **more: Any,
    ) -> TriggeredGet:
        """A get of `length` bytes, from `source` over there to `target` here."""
        fields: dict[str, Any] = {
            "region": self.near.region,
            "target": self.near.region.address + target,
            "length": length,
            "source": self.base + source,
            "source_key": self.key,
        }
        return TriggeredGet(**(self._fields(tag, flag, fires) | fields | more))

    def notify(
        self,
        tag: int,
        index: int,
        value: int,
        *,
        fires: tuple[FlagWord | Counter, int] | None = None,
        **more: Any,
    ) -> TriggeredNotify:
        """A word put into word `index` over there."""
        fields = {"target": self.word_target(index), "target_key": self.key, "value": value}
        return TriggeredNotify(**(self._fields(tag, None, fires) | fields | more))

    def _fields(
        self, tag: int, flag: tuple[int, int] | None, fires: tuple[FlagWord | Counter, int] | None
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {"tag": tag, "endpoint": self.endpoint, "peer": self.peer}
        if flag is not None:
            fields |= {"flag_target": self.word_target(flag[0]), "flag_key": self.key, "flag_value": flag[1]}
        if fires is not None:
            on, threshold = fires
            trigger = self.near.counter(on) if isinstance(on, FlagWord) else on
            fields |= {"trigger": trigger, "threshold": threshold}
        return fields

    def arm(self, *operations: Operation) -> None:
        arm(self.near.fabric, operations)

    def fence(self) -> int:
        """A put at once, and its end: by then the agent has looked at every flag word once more.

        Returns the value that it put into the last word over there.
        """
        self._fences += 1
        self.arm(self.put(self._fences, 0, flag=(PAGE // 8 - 1, self._fences)))
        assert self.near.final(self._fences).kind == EventKind.DONE
        return self._fences


def quieten(*fabrics: Fabric) -> None:
    """Let shm come to rest before the first of two ends in one process is closed.

    This libfabric's shm gives both the same mapping of their memory, and closing one unmaps it: whatever the other
    thread still does there ends the process.
    """
    if not any(fabric.provider == "shm" for fabric in fabrics):
        return
    for fabric in fabrics:
        with suppress(FabricError):
            fabric.flush()
    before = [fabric.statistics().sleeps for fabric in fabrics]
    with suppress(AssertionError):
        wait_until(
            lambda: all(
                fabric.statistics().sleeps > sleeps + 3
                for fabric, sleeps in zip(fabrics, before, strict=True)
            ),
            "both rest",
            seconds=2.0,
        )


class Pair:
    """Two fabrics of this process that know each other, and flag words that outlive both."""

    def __init__(self, provider: str, length: int = 1 << 20, work_max: int = WORK_MAX, **more: Any) -> None:
        self.provider = provider
        self.flags = FlagWords.create(64)
        self.near = Side(provider, length, work_max, **more)
        self.far = Side(provider, length, **more)
        self.there = Way.between(self.near, self.far)
        self.back = Way.between(self.far, self.near)

    def close(self) -> None:
        open_ones = [side.fabric for side in (self.near, self.far) if not side.fabric.closed]
        if len(open_ones) > 1:
            quieten(*open_ones)
        self.near.close()
        self.far.close()
        self.flags.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
