"""Saves from a device's memory: a side stream copies each layer when it is computed, and stores a flag behind it.

The engine's thread queues work and waits for nothing. The side stream waits for the layer, copies its pages into
page-locked memory that is registered with the fabric and, after an object's last layer, stores the next number to one
flag word; this fires the puts that `saving`'s thread has armed on it. The step ends with an event that the compute
stream waits for, so that blocks are not written to before they are copied; it waits for copies, and never for the node.

A step may compute a layer several times: a draft model does for each token that it drafts after the first. The layer is
copied each time, and its objects wait for the step's last number.

What always holds: the guarantees of `saving`; an object is sent only with what the step computed last; memory of a
batch is reused only after the flag has shown that all copies into it are done. A step that finds no room is skipped and
counted. If the device refuses work, nothing of the step is sent. Copies are waited for until VLLM_DEVICE_COPY_MS after
their step, so that a device that hangs holds up the engine's exit once, and not for each batch.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.clock import SystemClock
from kvstore.engines.vllm.saving import Batch, Saved, Saves
from kvstore.errors import KvError
from kvstore.limits import VLLM_DEVICE_COPY_MS
from nic_offload.device import Copy

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

    from kvstore.clock import Clock
    from kvstore.engines.copy_flag import CopyFlag
    from kvstore.engines.vllm.connector_metadata import Wanted
    from kvstore.engines.vllm.device_memory import DeviceMemory
    from kvstore.engines.vllm.saving import Sender, Sent

__all__ = ["DeviceSaves"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's


class _Late(NamedTuple):
    """Objects that the device did not copy in time, and that are not sent."""

    objects: int

    def outcome(self, wait_s: float) -> list[bool | None]:  # noqa: ARG002
        return [False] * self.objects


class DeviceSaves(Saves):
    """The saves of a worker. Called from the engine's thread only, except the methods of its own thread."""

    def __init__(
        self, memory: DeviceMemory, staging: mmap.mmap, sender: Sender, flag: CopyFlag, side: object
    ) -> None:
        """`side` is the stream of the flag."""
        super().__init__(memory, staging, sender)
        self._on_device, self._flag, self._side = memory, flag, side
        self._opened: list[Batch] | None = None  # this step's
        self._members: dict[tuple[int, int], frozenset[str]] = {}  # by group and object: its layers
        self._left: dict[tuple[int, int], set[str]] = {}  # of these, the ones that are not copied yet
        self._is_broken = False
        self._held: deque[Batch] = deque()  # the thread's own: released, but copies may be pending
        self._clock: Clock = SystemClock()

    def begin(self, blocks: Sequence[Wanted]) -> None:
        """Record the blocks that this step computes."""
        super().begin(blocks)
        self._opened, self._is_broken = None, False

    def layer_done(self, name: str) -> None:
        """Queue the copies of a layer whose work is queued on the compute stream."""
        super().layer_done(name)
        if not self._blocks or name not in self._layers:
            return
        if self._opened is None:
            self._opened = list(self._reserve(self._blocks))
            for batch in self._opened:
                batch.thresholds = [0] * len(self._memory.groups[batch.blocks[0].group].runs)
            self._members = {
                (number, at): frozenset(group.layer_names[layer] for layer in run)
                for number, group in enumerate(self._memory.groups)
                for at, run in enumerate(group.runs)
            }
            self._left = {which: set(names) for which, names in self._members.items()}
        try:
            self._capture(name, self._opened)
        except KvError as error:  # the layer counts as done
            self._refused(error)

    def settle(self, *, is_sound: bool) -> None:
        """Let the compute stream wait for the copies, and have them sent if the step can be relied on."""
        blocks, self._blocks = self._blocks, ()
        batches, self._opened = self._opened or [], None
        if not blocks:
            return
        device = self._on_device.device
        copied_at = self._flag.last + 1  # the next store to the flag, in this step or a later one
        try:
            # Also without a batch: memory of a step that the device refused may wait for the store.
            self._flag.store_next(self._side)
            device.wait(device.current_stream(), device.record(self._side))
        except KvError as error:
            self._refused(error)
        copied_by_ns = self._clock.monotonic_ns() + VLLM_DEVICE_COPY_MS * 1_000_000
        is_withheld = bool(self._undone) or not is_sound
        if is_withheld and not batches:
            self._outcomes.append(Saved([], withheld=self._pages_of(blocks)))
        for batch in batches:
            batch.thresholds = [value or copied_at for value in batch.thresholds]
            batch.copied_at, batch.copied_by_ns = copied_at, copied_by_ns
            batch.is_withheld = is_withheld or self._is_broken
            if batch.is_withheld:
                pages = self._pages_of(batch.blocks)
                lost = Saved([], failed=pages) if self._is_broken else Saved([], withheld=pages)
                self._outcomes.append(lost)
            self._batches.append(batch)
            self._thread.submit(self._work)
        self._thread.submit(self._give_back)

    def _capture(self, name: str, batches: Sequence[Batch]) -> None:
        device, group_of = self._on_device.device, self._memory.groups
        device.wait(self._side, device.record(device.current_stream()))
        for batch in batches:
            if name in group_of[batch.blocks[0].group].layer_names:
                device.copy(self._side, self._copies(batch, name))
        for (number, at), members in self._members.items():
            if name not in members:
                continue
            of_group = [batch for batch in batches if batch.blocks[0].group == number]
            left, value = self._left[number, at], 0
            if name in left:
                left.discard(name)
                if not left and of_group:
                    value = self._flag.store_next(self._side)
            for batch in of_group:
                batch.thresholds[at] = value  # 0: the step's last number

    def _copies(self, batch: Batch, name: str) -> Iterator[Copy]:
        group = self._memory.groups[batch.blocks[0].group]
        sources, length = self._on_device.runs(name, [wanted.block for wanted in batch.blocks])
        begin = self._address + batch.offset + group.layer_names.index(name) * group.page_bytes
        of_block = np.arange(sources.shape[0], dtype=np.uint64)[:, None] * np.uint64(group.block_bytes)
        of_run = np.arange(sources.shape[1], dtype=np.uint64) * np.uint64(length)
        targets = np.uint64(begin) + of_block + of_run
        for target, source in zip(targets.ravel().tolist(), sources.ravel().tolist(), strict=True):
            yield Copy(target, source, length)

    def _refused(self, error: KvError) -> None:
        if not self._is_broken:
            log.warning("A step's blocks are not stored: %s", error)
        self._is_broken = True

    # --- the thread

    def _send(self, batch: Batch) -> Sent:
        left_s = max(0.0, (batch.copied_by_ns - self._clock.monotonic_ns()) / 1e9)
        if not left_s and not self._flag.has(batch.copied_at):
            return _Late(len(batch.blocks) * len(self._memory.groups[batch.blocks[0].group].runs))
        return self._sender.send(self._objects(batch), left_s)

    def _release(self, batch: Batch) -> None:
        self._held.append(batch)
        self._give_back()

    def _give_back(self) -> None:
        while self._held and self._flag.has(self._held[0].copied_at):
            self._ring.give_back(self._held.popleft().taken_bytes)
