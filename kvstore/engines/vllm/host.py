"""Host memory between vLLM's offloading and our node: slots of one chunk each.

vLLM's OffloadingSpec can't report a failed load. So a chunk is a hit only once its exact bytes are here, and the worker
only copies between the engine's memory and a slot. Threads of our own move chunks between the slots and the node.

What always holds: a readable slot holds the exact bytes of its key until the promised load has ended; nothing waits for
the node. Calls come from the scheduler's thread; the two threads only complete them.
"""

from __future__ import annotations

import enum
import logging
import queue
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.client import Hit
from kvstore.clock import SystemClock
from kvstore.engines.stores import block_at, is_about_domains
from kvstore.errors import KvError
from kvstore.limits import (
    LEASE_TIMEOUT_MS,
    SLOTS_PER_CLIENT_MAX,
    VLLM_ABSENT_MAX,
    VLLM_ABSENT_NS,
    VLLM_QUEUED_AT_ONCE,
    VLLM_QUEUED_MAX,
)

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from kvstore.client import Block, ClusterBlock
    from kvstore.engines.stores import Store

__all__ = ["HostMemory", "State"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


class State(enum.Enum):
    """The state of a key."""

    UNKNOWN = "unknown"  # until the node has answered
    ABSENT = "absent"
    FILLING = "filling"  # the engine is copying into its slot
    HERE = "here"


@dataclass(slots=True)
class _Slot:
    number: int
    state: State
    users: int = 0  # promised loads, and our threads: the slot is not reused


class HostMemory:
    """All slots of one engine."""

    def __init__(
        self,
        client: Store,
        memory: mmap.mmap,
        slot_bytes: int,
        key_of: Callable[[bytes], bytes],
        *,
        timeout_s: float,
    ) -> None:
        self._client, self._slot_bytes, self._key_of = client, slot_bytes, key_of
        self._timeout_s = timeout_s
        self._region = client.register(memory)
        self._lock = threading.Condition()
        self._slots: OrderedDict[bytes, _Slot] = OrderedDict()  # least recently used first
        self._free = list(range(len(memory) // slot_bytes))
        self._absent: dict[bytes, int] = {}
        self._clock = SystemClock()
        self._to_fetch: queue.Queue[bytes] = queue.Queue(VLLM_QUEUED_MAX)
        self._to_send: queue.Queue[bytes] = queue.Queue(VLLM_QUEUED_MAX)
        self._fetching = 0
        for work, waiting in ((self._fetch, self._to_fetch), (self._send, self._to_send)):
            threading.Thread(target=self._run, args=(work, waiting), name="kvstore-host", daemon=True).start()

    # --- vLLM's calls

    def look(self, key: bytes) -> State:
        """The state of a key; for an unknown one the node is asked."""
        with self._lock:
            if (slot := self._slots.get(key)) is not None:
                return slot.state
            since_ns = self._absent.get(key)
            if since_ns is not None and self._clock.monotonic_ns() - since_ns < VLLM_ABSENT_NS:
                return State.ABSENT
            slot = self._take(key, State.UNKNOWN)
            if slot is None or self._to_fetch.full():
                self._drop(key)
                return State.ABSENT
            slot.users += 1
            self._fetching += 1
        self._to_fetch.put_nowait(key)
        return State.UNKNOWN

    def wait(self, seconds: float) -> None:
        """Wait a moment for the threads if a request to the node is pending."""
        with self._lock:
            if self._fetching:
                self._lock.wait(seconds)

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """Hold the slots of keys that are here; returns the slots."""
        with self._lock:
            for key in keys:
                self._slots[key].users += 1
                self._slots.move_to_end(key)
            return [self._slots[key].number for key in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        """End what `hold` began."""
        with self._lock:
            for key in keys:
                self._slots[key].users -= 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark keys as recently used."""
        with self._lock:
            for key in keys:
                if key in self._slots:
                    self._slots.move_to_end(key)

    def begin_fill(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Assign a slot to each missing block, while there are free slots."""
        with self._lock:
            given = []
            for key in keys:
                if key not in self._slots and (slot := self._take(key, State.FILLING)) is not None:
                    slot.users += 1
                    self._absent.pop(key, None)
                    given.append((key, slot.number))
            return given

    def end_fill(self, keys: Sequence[bytes], *, filled: bool) -> None:
        """The engine has copied, or failed to: the copied chunks are sent to the node."""
        for key in keys:
            with self._lock:
                slot = self._slots[key]
                slot.state = State.HERE
                if not filled or self._to_send.full():
                    slot.users -= 1
                    if not filled:
                        self._drop(key)
                    continue
            self._to_send.put_nowait(key)

    def clear(self) -> None:
        """Forget unused entries."""
        with self._lock:
            for key in [key for key, slot in self._slots.items() if not slot.users]:
                self._drop(key)
            self._absent.clear()

    # --- slots, with the lock held

    def _take(self, key: bytes, state: State) -> _Slot | None:
        if not self._free:
            unused = next((one for one, slot in self._slots.items() if not slot.users), None)
            if unused is None:
                return None
            self._drop(unused)
        slot = self._slots[key] = _Slot(self._free.pop(), state)
        return slot

    def _drop(self, key: bytes) -> None:
        if (slot := self._slots.pop(key, None)) is not None:
            self._free.append(slot.number)

    # --- the threads

    def _run(self, work: Callable[[list[bytes]], None], waiting: queue.Queue[bytes]) -> None:
        while True:
            keys = [waiting.get()]
            while len(keys) < VLLM_QUEUED_AT_ONCE and not waiting.empty():
                keys.append(waiting.get())
            try:
                work(keys)
            except Exception:  # no error may stop the engine
                log.exception("Moving chunks failed.")

    def _block(self, key: bytes) -> Block | ClusterBlock:
        return block_at(
            self._key_of(key), self._region, self._slots[key].number * self._slot_bytes, self._slot_bytes
        )

    def _fetch(self, keys: list[bytes]) -> None:
        here = [False] * len(keys)
        try:
            here = self._fetched(keys)
        finally:
            with self._lock:
                now_ns = self._clock.monotonic_ns()
                if len(self._absent) > VLLM_ABSENT_MAX:
                    self._absent.clear()
                for key, is_here in zip(keys, here, strict=True):
                    self._slots[key].users -= 1
                    self._slots[key].state = State.HERE
                    if not is_here:
                        self._drop(key)
                        self._absent[key] = now_ns
                self._fetching -= len(keys)
                self._lock.notify_all()

    def _fetched(self, keys: list[bytes]) -> list[bool]:
        got = self._client.get([self._block(key) for key in keys], timeout_s=self._timeout_s)
        return [isinstance(one, Hit) for one in got]

    def _send(self, keys: list[bytes]) -> None:
        try:
            part = SLOTS_PER_CLIENT_MAX
            for first in range(0, len(keys), part):
                armed = self._client.arm([self._block(key) for key in keys[first : first + part]])
                for result in armed.wait(LEASE_TIMEOUT_MS / 1000):
                    is_about_domains(result.error, log)
                armed.abandon()  # chunks that have not landed by now: their slots are reused
        except KvError as error:
            if not is_about_domains(error, log):
                log.debug("%d chunks were not stored: %s", len(keys), error)
        finally:
            self.release(keys)
