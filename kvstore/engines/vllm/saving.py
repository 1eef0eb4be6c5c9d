"""Saves: pages leave the engine's memory while it computes, layer by layer, on a flag.

A step's save is begun before its forward pass: a thread reserves room on the node and arms a put for each page. What
fires them is the engine's own: `layer_done` stores to the flag word after each layer, and all pages up to there go.
At the end of the step `settle` waits until all have landed in the node's memory; by then almost all have, as they went
while later layers were computed.

What always holds: when `settle` returns, nothing reads the engine's memory any more, whatever became of the puts; so
the engine may free, preempt and write its blocks as it likes. Nothing here raises, and nothing waits for longer than
the deadline. What did not get out in time is not stored, and that is all.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.client import Block, Client
from kvstore.clock import SystemClock
from kvstore.errors import KvError, Overloaded
from nic_offload.flags import FlagWords

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import ArmedPuts
    from kvstore.engines.vllm.memory import KvMemory
    from kvstore.engines.vllm.plan import Wanted
    from nic_offload.fabric import Region

__all__ = ["SLOTS_BYTES", "Saved", "Saves"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

SLOTS_BYTES = 256 << 20  # of the node's memory, for what one worker has under way
_ACK_TIMEOUT_S = 30.0  # for the drive's word about what has landed


@dataclass(slots=True)
class Saved:
    """How a step's save ended."""

    stored: list[tuple[int, bytes]]  # blocks of which all pages are stored, by group and digest
    pages: int = 0  # sent
    bytes: int = 0
    failed: int = 0  # pages that are not stored


@dataclass(slots=True)
class _Step:
    """One step's save."""

    blocks: Sequence[Wanted]
    lock: threading.Lock = field(default_factory=threading.Lock)
    armed: list[tuple[ArmedPuts, list[int]]] = field(
        default_factory=list
    )  # each with the blocks of its pages
    given_up: int = 0  # pages that were not armed
    broken: set[int] = field(default_factory=set)  # blocks that lack a page
    over: bool = False  # no put is armed any more
    prepared: threading.Event = field(default_factory=threading.Event)
    until_ns: int = 0


class Saves:
    """Of one worker. All calls but the thread's own come from the engine's thread."""

    def __init__(
        self, client: Client, memory: KvMemory, regions: Sequence[Region], slots: int, timeout_s: float
    ) -> None:
        self._client, self._memory, self._regions = client, memory, regions
        self._slots = slots
        self._timeout_s = timeout_s
        self._flags = FlagWords.create(1)
        self._value = 0  # of the flag word: it only grows
        self._order = {
            name: (number, layer)
            for number, group in enumerate(memory.groups)
            for layer, name in enumerate(group.layer_names)
        }
        self._layers = max(len(group.layer_names) for group in memory.groups)
        self._undone: list[set[int]] = []
        self._step: _Step | None = None
        self._last = _Step(())
        self._last.prepared.set()
        self._armed: list[ArmedPuts] = []  # the thread's own: what may still have slots
        self._ending: deque[_Step] = deque()
        self._skipped = 0  # pages of steps that were not saved
        self._thread = ThreadPoolExecutor(1, "kvstore-save")
        self._clock = SystemClock()

    def begin(self, blocks: Sequence[Wanted]) -> None:
        """Have puts armed for what this step will have computed, unless those of an earlier one still wait for room."""
        if not self._last.prepared.is_set():
            self._skipped += sum(len(self._memory.groups[wanted.group].layer_names) for wanted in blocks)
            return
        if not blocks:
            return
        self._step = self._last = _Step(blocks)
        self._undone = [set(range(len(group.layer_names))) for group in self._memory.groups]
        self._thread.submit(self._prepare, self._step, self._value)

    def layer_done(self, name: str) -> None:
        """Let the pages of a layer go, whose KV is written, with those of all layers before it."""
        if self._step is None or name not in self._order:
            return
        group, layer = self._order[name]
        self._undone[group].discard(layer)
        # A layer's pages wait for its number, in every group: what counts is the first that is not written in any.
        first = min(min(undone, default=self._layers) for undone in self._undone)
        self._flags[0].store(self._value + first)

    def settle(self) -> None:
        """All layers are written: wait until the pages are out of our memory, or end what is not."""
        step, self._step = self._step, None
        if step is None:
            return
        self._value += self._layers
        self._flags[0].store(self._value)
        until_ns = self._clock.monotonic_ns() + int(self._timeout_s * 1e9)

        def left_s() -> float:
            return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

        step.prepared.wait(left_s())
        with step.lock:
            step.over = True
        for armed, _ in step.armed:
            if not armed.wait_landed(left_s()):
                armed.abandon()
        step.until_ns = self._clock.monotonic_ns() + int(_ACK_TIMEOUT_S * 1e9)
        self._ending.append(step)

    def ended(self) -> list[Saved]:
        """The steps of which everything is known by now."""
        skipped, self._skipped = self._skipped, 0
        ended = [Saved([], failed=skipped)] if skipped else []
        while self._ending:
            step = self._ending[0]
            is_late = self._clock.monotonic_ns() > step.until_ns
            if not is_late and not (
                step.prepared.is_set() and all(armed.has_ended for armed, _ in step.armed)
            ):
                break
            ended.append(self._outcome(self._ending.popleft()))
        return ended

    def _outcome(self, step: _Step) -> Saved:
        saved = Saved([], failed=step.given_up)
        broken = set(step.broken)
        for armed, numbers in step.armed:
            for number, result in zip(numbers, armed.wait(0), strict=True):
                if not result.has_block:
                    saved.failed += 1
                    broken.add(number)
                elif result.error is None and not result.already_stored:
                    saved.pages += 1
                    saved.bytes += self._memory.groups[step.blocks[number].group].page_bytes
        saved.stored = [
            (wanted.group, wanted.digest) for number, wanted in enumerate(step.blocks) if number not in broken
        ]
        return saved

    # --- the thread

    def _prepare(self, step: _Step, value: int) -> None:
        try:
            pages = self._pages(step.blocks, value)
            part = max(1, self._slots // 2)
            for first in range(0, len(pages), part):
                some = pages[first : first + part]
                if not self._arm(step, some):
                    step.given_up += len(some)
                    step.broken.update(number for number, _ in some)
        except Exception:  # the engine goes on, whatever it was
            log.exception("Saving blocks failed; they are not stored.")
            step.broken.update(range(len(step.blocks)))
        finally:
            step.prepared.set()

    def _pages(self, blocks: Sequence[Wanted], value: int) -> list[tuple[int, Block]]:
        """The pages of all blocks, first those of the first layers: they are written first."""
        pages = []
        for number, wanted in enumerate(blocks):
            group = self._memory.groups[wanted.group]
            places = self._memory.pages(wanted.group, wanted.block)
            for layer, (key, (buffer, offset)) in enumerate(
                zip(group.pages(wanted.digest, self._memory.shard), places, strict=True)
            ):
                block = Block(
                    key, self._regions[buffer], offset, group.page_bytes, threshold=value + layer + 1
                )
                pages.append((number, block))
        pages.sort(key=lambda page: page[1].threshold)
        return pages

    def _arm(self, step: _Step, pages: Sequence[tuple[int, Block]]) -> bool:
        """Reserve and arm; whether it was done before the step was over."""
        blocks = [block for _, block in pages]
        while not step.over:
            try:
                reservation = self._client.reserve(blocks)
            except Overloaded:
                # If puts of ours have the slots, each that ends gives one back.
                self._armed = [armed for armed in self._armed if not armed.has_ended]
                if not self._armed:
                    return False
                self._armed[0].wait(self._timeout_s)
                continue
            except KvError as error:
                log.debug("No room for %d pages: %s", len(blocks), error)
                return False
            with step.lock:
                if not step.over:
                    armed = reservation.arm(self._flags[0])
                    step.armed.append((armed, [number for number, _ in pages]))
                    self._armed = [one for one in self._armed if not one.has_ended] + [armed]
                    return True
            reservation.give_back()
        return False
