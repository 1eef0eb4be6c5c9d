"""Saves: at the end of a step its pages are copied from the engine's memory; a thread sends the copies.

The step only copies memory, one call for several blocks: no call to the node, no lock that a thread holds while it
waits. So a slow, stopped or dead node costs a step nothing. Pages without room for a copy are not saved, and are
counted.

Why a copy, instead of holding the engine's own blocks until they are sent: a held block is missing from the engine's
cache as long as the node takes; blocks after a failed load are recomputed in place; and vLLM frees blocks of preempted
requests and past windows without asking. The copy is exact whatever happens next.

What always holds: a step that `settle` is told is unsound, or whose layers were not all computed, saves nothing; all
pages of a block are copied, or none; after `settle` nothing reads the engine's memory.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.engines.vllm.device_memory import DeviceMemory
from kvstore.engines.vllm.ring import Ring
from kvstore.errors import LayoutError
from kvstore.limits import SAVE_BATCH_PAGES_MAX, VLLM_ACK_SLICE_MS
from kvstore.names import UNSAID
from nic_offload.memory import undumped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.engines.vllm.connector_metadata import Wanted
    from kvstore.engines.vllm.kv_memory import KvMemory

__all__ = ["Batch", "Copied", "Saved", "Saves", "Sender", "Sent", "staging"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_ACK_WAIT_S = VLLM_ACK_SLICE_MS / 1000


@dataclass(slots=True)
class Saved:
    """The outcomes of some blocks."""

    stored: list[tuple[int, bytes]]  # blocks with all pages stored, by group and digest
    pages: int = 0  # sent
    bytes: int = 0
    failed: int = 0  # pages that the node did not take
    skipped: int = 0  # pages that there was no room to copy
    withheld: int = 0  # pages of a step that was not sound


class Copied(NamedTuple):
    """An object in the memory of `Saves`: contiguous pages of a block."""

    key: bytes
    offset: int
    length: int
    domain: bytes = UNSAID
    threshold: int = 1  # complete once the sender's flag, if any, has this value


class Sent(Protocol):
    """Objects whose memory is free again, and whose outcomes may be pending."""

    def outcome(self, wait_s: float) -> list[bool | None] | None:
        """Return for each object True if it was sent and stored, None if it was already stored, False if it failed.

        None in place of the list: not all outcomes are known within `wait_s`.
        """
        ...


class Sender(Protocol):
    """How objects are sent to the node."""

    def send(self, objects: Sequence[Copied], copying_s: float = 0.0) -> Sent:
        """Send; when this returns, by its deadline, nothing reads the objects any more.

        `copying_s`: how much longer they may take to be copied.
        """
        ...


@dataclass(slots=True)
class Batch:
    """Some blocks of one group, copied: all layers of the first, then all of the second."""

    blocks: list[Wanted]
    offset: int
    taken_bytes: int  # of the ring
    thresholds: list[int] = field(default_factory=list)  # of a device's copies, of each object of a block
    copied_at: int = 0  # the flag's value behind the last copy
    copied_by_ns: int = 0  # when it is to have this value
    is_withheld: bool = False  # perhaps copied, and not to be sent


class Saves:
    """The saves of a worker. Called from the engine's thread only, except the methods of its own thread."""

    def __init__(self, memory: KvMemory | DeviceMemory, staging: mmap.mmap, sender: Sender) -> None:
        self._memory, self._sender = memory, sender
        self._ring = Ring(len(staging))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        self._layers = frozenset(name for group in memory.groups for name in group.layer_names)
        self._undone: set[str] = set()
        self._blocks: Sequence[Wanted] = ()
        self._batches: deque[Batch] = deque()
        self._outcomes: deque[Saved] = deque()
        self._unanswered: deque[tuple[Batch, Sent]] = deque()  # the thread's own
        self._thread = ThreadPoolExecutor(1, "kvstore-save")

    def begin(self, blocks: Sequence[Wanted]) -> None:
        """Record the blocks that this step computes."""
        self._blocks = blocks
        self._undone = set(self._layers)

    def layer_done(self, name: str) -> None:
        """Record that a layer's KV is written."""
        self._undone.discard(name)

    def settle(self, *, is_sound: bool) -> None:
        """Copy the step's blocks, if they can be relied on, and queue them to be sent."""
        blocks, self._blocks = self._blocks, ()
        if not blocks:
            return
        if self._undone or not is_sound:
            self._outcomes.append(Saved([], withheld=self._pages_of(blocks)))
            return
        for batch in self._reserve(blocks):
            self._copy(batch)
            self._batches.append(batch)
            self._thread.submit(self._work)

    def ended(self) -> list[Saved]:
        """Results since the last call."""
        ended = []
        while self._outcomes:
            ended.append(self._outcomes.popleft())
        return ended

    def _pages_of(self, blocks: Sequence[Wanted]) -> int:
        return sum(len(self._memory.groups[wanted.group].layer_names) for wanted in blocks)

    def _copy(self, batch: Batch) -> None:
        assert not isinstance(self._memory, DeviceMemory)
        number, blocks = batch.blocks[0].group, [wanted.block for wanted in batch.blocks]
        self._memory.copy(number, blocks, self._address + batch.offset)

    def _reserve(self, blocks: Sequence[Wanted]) -> Iterator[Batch]:
        """Allocate memory for blocks, several of one group at a time; those without room are skipped."""
        for number, group in enumerate(self._memory.groups):
            of_group = [wanted for wanted in blocks if wanted.group == number]
            part = max(1, SAVE_BATCH_PAGES_MAX // len(group.layer_names))
            for first in range(0, len(of_group), part):
                some = of_group[first : first + part]
                taken = self._ring.take(len(some) * group.block_bytes)
                if taken is None:
                    self._outcomes.append(Saved([], skipped=self._pages_of(some)))
                else:
                    yield Batch(some, *taken)

    # --- the thread

    def _work(self) -> None:
        batch = self._batches.popleft()
        try:
            if not batch.is_withheld:
                self._unanswered.append((batch, self._send(batch)))
        except Exception:  # no error may stop the engine
            log.exception("Saving blocks failed; they are not stored.")
            self._outcomes.append(Saved([], failed=self._pages_of(batch.blocks)))
        finally:
            self._release(batch)
        while self._unanswered:
            batch, sent = self._unanswered[0]
            results = sent.outcome(0 if self._batches else _ACK_WAIT_S)
            if results is not None:
                self._unanswered.popleft()
                self._outcomes.append(self._outcome(batch, results))
            elif self._batches:
                break

    def _send(self, batch: Batch) -> Sent:
        return self._sender.send(self._objects(batch))

    def _release(self, batch: Batch) -> None:
        """Nothing reads the batch's memory any more."""
        self._ring.give_back(batch.taken_bytes)

    def _objects(self, batch: Batch) -> list[Copied]:
        group = self._memory.groups[batch.blocks[0].group]
        runs = [(run.start * group.page_bytes, len(run) * group.page_bytes) for run in group.runs]
        keys = iter(group.keys_of(batch.blocks, self._memory.shard))
        thresholds = batch.thresholds or [1] * len(runs)
        return [
            Copied(
                next(keys), batch.offset + at * group.block_bytes + begin, length, wanted.domain, threshold
            )
            for at, wanted in enumerate(batch.blocks)
            for (begin, length), threshold in zip(runs, thresholds, strict=True)
        ]

    def _outcome(self, batch: Batch, results: list[bool | None]) -> Saved:
        group = self._memory.groups[batch.blocks[0].group]
        runs = group.runs
        pages = {True: 0, False: 0, None: 0}
        stored = []
        for at, wanted in enumerate(batch.blocks):
            of_block = results[at * len(runs) : (at + 1) * len(runs)]
            for result, run in zip(of_block, runs, strict=True):
                pages[result] += len(run)
            if False not in of_block:
                stored.append((wanted.group, wanted.digest))
        return Saved(stored, pages=pages[True], bytes=pages[True] * group.page_bytes, failed=pages[False])


def staging(memory: KvMemory | DeviceMemory, size: int) -> mmap.mmap:
    """Allocate the memory for copies; LayoutError if it is too small for one block."""
    for group in memory.groups:
        if (needed := group.block_bytes) > size:
            raise LayoutError(f"host_bytes is {size}; one block has {needed} bytes.")
    copies = undumped(size)
    with suppress(OSError):  # a kernel without huge pages
        copies.madvise(mmap.MADV_HUGEPAGE)  # else a step waits for a fault at each page that it copies first
    return copies
