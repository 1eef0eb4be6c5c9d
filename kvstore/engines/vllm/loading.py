"""Loads: blocks come from the node into the engine's memory, in threads of their own or while the step waits.

What always holds: a load ends by its deadline; it reports for each block whether all of its exact pages are there;
after that nothing writes to the block any more. Nothing here raises.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.client import as_request
from kvstore.clock import SystemClock
from kvstore.engines.vllm.page_transport import Object
from kvstore.limits import VLLM_LOAD_THREADS, VLLM_LOADING_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.engines.vllm.connector_metadata import Load, Wanted
    from kvstore.engines.vllm.device_memory import DeviceMemory
    from kvstore.engines.vllm.kv_memory import KvMemory
    from kvstore.engines.vllm.page_transport import Transport

__all__ = ["Loaded", "Loads"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a load ended."""

    load: Load
    missing: list[Wanted]
    bytes: int
    ns: int

    @classmethod
    def none_of(cls, load: Load) -> Loaded:
        """It brought nothing."""
        return cls(load, list(load.blocks), 0, 0)


class Loads:
    """The loads of a worker."""

    def __init__(
        self, transport: Transport, memory: KvMemory | DeviceMemory, timeout_s: float, step_timeout_s: float
    ) -> None:
        """`step_timeout_s`: for a load that a step waits for."""
        self._transport, self._memory = transport, memory
        self._timeout_s, self._step_timeout_s = timeout_s, step_timeout_s
        self._threads = ThreadPoolExecutor(VLLM_LOAD_THREADS, "kvstore-load")
        self._news = threading.Condition()
        self._ended: deque[Loaded] = deque()
        self._under_way = 0
        self._clock = SystemClock()

    def begin(self, load: Load) -> None:
        """Load in a thread; `ended` returns finished loads."""
        self._under_way += 1
        self._threads.submit(self._in_thread, load)

    def give_up(self, load: Load) -> None:
        """A load that can't begin: all blocks are missing."""
        self._under_way += 1
        self._end(Loaded.none_of(load))

    def ended(self, *, wait: bool) -> list[Loaded]:
        """The loads that have ended; with `wait`, wait a moment for one, so that an idle engine doesn't spin."""
        with self._news:
            if wait and self._under_way and not self._ended:
                self._news.wait(VLLM_LOADING_WAIT_S)
            ended = list(self._ended)
            self._ended.clear()
        self._under_way -= len(ended)
        return ended

    def load(self, load: Load) -> Loaded:
        """Load now."""
        began_ns = self._clock.monotonic_ns()
        try:
            with as_request(load.request):  # for `kvstore explain`
                timeout_s = self._step_timeout_s if load.waits else self._timeout_s
                missing, size = self._fetch(load.blocks, timeout_s)
        except Exception:  # no error may stop the engine
            log.exception("Loading blocks failed; they are computed.")
            missing, size = list(load.blocks), 0
        return Loaded(load, missing, size, self._clock.monotonic_ns() - began_ns)

    def _in_thread(self, load: Load) -> None:
        self._end(self.load(load))

    def _end(self, loaded: Loaded) -> None:
        with self._news:
            self._ended.append(loaded)
            self._news.notify_all()

    def _fetch(self, blocks: Sequence[Wanted], timeout_s: float) -> tuple[list[Wanted], int]:
        objects: list[Object] = []
        places: list[tuple[Wanted, int, int]] = []  # the positions of each block's objects
        for number, group in enumerate(self._memory.groups):
            of_group = [wanted for wanted in blocks if wanted.group == number]
            if not of_group:
                continue
            pieces = self._memory.pieces(number, [wanted.block for wanted in of_group])
            runs = [(run.start, run.stop, len(run) * group.page_bytes) for run in group.runs]
            keys = iter(group.keys_of(of_group, self._memory.shard))
            for wanted, rows in zip(of_group, pieces, strict=True):
                places.append((wanted, len(objects), len(objects) + len(runs)))
                objects += [Object(next(keys), rows[start:stop], length) for start, stop, length in runs]
        here = self._transport.fetch(objects, timeout_s)
        missing, size = [], 0
        for wanted, first, end in places:
            if all(here[first:end]):
                size += self._memory.groups[wanted.group].block_bytes
            else:
                missing.append(wanted)
        return missing, size
